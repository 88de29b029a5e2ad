"""The example of `aradix/serve/README.md`, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.serve.calls import ask
from tests.serve.folders import small_llama
from tests.support.places import ROOT

README = (ROOT / "aradix" / "serve" / "README.md").read_text(encoding="utf-8")


@pytest.mark.anyio
async def test_the_app_may_be_mounted_in_another_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(example, scope)
    app = scope["make_app"](small_llama(tmp_path))
    async with app.router.lifespan_context(app):
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        assert (await ask(app, "/llm/v1/chat/completions", body)).status == 401
        answer = await ask(app, "/llm/v1/chat/completions", body, authorization="Bearer secret")
        assert answer.found["usage"]["completion_tokens"] == 5
        assert (await ask(app, "/llm/health")).found == {"status": "ok"}
        assert (await ask(app, "/llm/", authorization="Bearer secret")).status == 200


def test_statuses_in_the_table_are_those_of_the_code() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "aradix" / "serve").glob("*.py"))
    raised = {int(status) for status in re.findall(r"ApiError\(\s*(\d{3})", source)}
    told = {int(status) for row in re.findall(r"^\| ([\d, ]+) \|", README, re.MULTILINE) for status in row.split(", ")}
    assert raised == told
    codes = set(re.findall(r'code="(\w+)"', source)) - {"unsupported_parameter", "unsupported_value"}
    assert codes == set(re.findall(r"\| `(\w+)` \|$", README, re.MULTILINE)) - {"code"}
