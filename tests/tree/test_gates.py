"""Gates: whom they stop, where, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from aradix.keys import Namespace, RadixKey
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import NOWHERE, Gate, Inserted, TreeCore
from tests.tree.lockstep import CoreFactory

A, B = Namespace(lora="x"), Namespace(salt="x")


def insert(core: TreeCore, ids: Sequence[int], first_slot: int = 0, namespace: Namespace | None = None) -> Inserted:
    done = core.insert(RadixKey(ids, namespace), np.arange(first_slot, first_slot + len(ids)))
    assert isinstance(done, Inserted)
    return done


def clean(core: TreeCore, *pins: int) -> bool:
    assert audit_tree(core, Counter(pin for pin in pins if pin)).problems == []
    return True


def test_a_gate_stops_walkers_and_changes_nothing(core_factory: CoreFactory) -> None:
    core = core_factory()
    insert(core, [1, 2, 3, 4])
    gate = core.close_gate(RadixKey([1, 2, 3]))
    assert (gate.num_matched, gate.met) == (3, False)
    version = core.version
    found = core.match(RadixKey([1, 2]), pin=True)
    assert (found.gate, found.num_matched, found.last) == (gate.node_id, 0, NOWHERE)
    assert core.insert(RadixKey([1, 2, 3, 9]), np.arange(4)) == gate.node_id
    assert core.match(RadixKey([1, 2]), past_pending=True).num_matched == 2
    assert core.peek(RadixKey([1, 2, 3, 4])) == 4
    core.set_gate(gate.node_id, Gate.GRANTED)
    assert core.match(RadixKey([1, 2, 3]), past_pending=True).gate == gate.node_id
    core.set_gate(gate.node_id, Gate.PASSING)
    assert core.match(RadixKey([1, 2, 3])).num_matched == 3
    assert core.close_gate(RadixKey([1, 2, 3, 4])).met
    assert core.version == version
    assert core.open_gate(gate.node_id) == []
    assert core.protected_tokens == 0
    assert clean(core)


def test_a_gate_on_a_root_stops_its_namespace_only(core_factory: CoreFactory) -> None:
    core = core_factory()
    insert(core, [1, 2], 0, A)
    insert(core, [1, 2], 10, B)
    gate = core.close_gate(RadixKey([7], A))
    assert core.match(RadixKey([9], A)).gate == gate.node_id
    assert core.match(RadixKey([1, 2], B)).num_matched == 2
    done = core.detach(A)
    assert (done.num_freed, done.num_held) == (2, 0)
    assert core.match(RadixKey([9], A)).gate == 0
    assert core.open_gate(gate.node_id) == []
    assert core.num_namespaces == 1


def test_growing_stops_at_a_gate_and_the_rest_stays_the_callers(core_factory: CoreFactory) -> None:
    core = core_factory()
    insert(core, [1, 2, 3, 4])
    pin = core.match(RadixKey([1]), pin=True).node_id
    core.match(RadixKey([1, 2]))
    gate = core.close_gate(RadixKey([1, 2, 3, 4]))
    done = core.extend(pin, RadixKey([1, 2, 3, 4, 5]), np.arange(10, 14))
    assert done is not None
    assert (done.prefix_len, done.end, done.existing.tolist()) == (2, 2, [1])
    assert core.peek(RadixKey([1, 2, 3, 4, 5])) == 4
    assert clean(core, done.node_id, gate.node_id)
