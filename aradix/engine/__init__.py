"""An async engine on the cache: a reference to read, and to start from.

    runner = LlamaRunner.from_gguf(path)
    async with RadixCache(runner.cache_params()) as cache, AsyncEngine(cache, runner) as engine:
        async for token in engine.generate(prompt_ids, SamplingParams(max_tokens=100)):
            ...

- `engine.py` takes requests, `request.py` is what one knows, and what its consumer holds.
- `scheduler.py` decides who is computed when, and whose slots go back.
- `runner.py` is what it asks of a model, `llama.py` one that answers, with weights that `weights.py` reads, from a
  `gguf_file.py` or a folder.
- `sampling.py` chooses tokens, `text.py` makes text of them.

The runner in torch needs the extra `engine`, which reads weights.
"""

from aradix.engine.engine import AsyncEngine, EngineStats
from aradix.engine.gguf_file import GGUFFile
from aradix.engine.llama import LlamaConfig, LlamaModel, LlamaRunner
from aradix.engine.request import EngineClosedError, Generation, Overloaded, StepError
from aradix.engine.runner import Chunk, ModelRunner
from aradix.engine.sampling import Sampler, SamplingParams
from aradix.engine.text import TextStream, Tokenizer

__all__ = [
    "AsyncEngine",
    "Chunk",
    "EngineClosedError",
    "EngineStats",
    "GGUFFile",
    "Generation",
    "LlamaConfig",
    "LlamaModel",
    "LlamaRunner",
    "ModelRunner",
    "Overloaded",
    "Sampler",
    "SamplingParams",
    "StepError",
    "TextStream",
    "Tokenizer",
]
