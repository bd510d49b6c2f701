"""What nobody with the secret has left in the store is no value; PyTorch's own groups meet there, too."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener.comm.signed_store import SignedStore
from evener.records.errors import NodeLost
from support.stores import memory_store

stores: Any = dist  # which are not typed


def test_values_read_back_and_prefixes_separate_them() -> None:
    store = memory_store()
    store.set("a", "text")
    store.under("run").under("small").set("a", b"\0bytes")
    assert (store.get("a"), store.get("run/small/a")) == (b"text", b"\0bytes")
    assert store.check(["a", "run/small/a"])
    assert not store.check(["a", "b"])
    assert store.num_keys() >= 2
    assert store.delete_key("a")
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(RuntimeError):
        store.get("a")
    with pytest.raises(RuntimeError):
        store.wait(["a"], timedelta(seconds=0.05))


def test_forged_or_moved_value_is_rejected_by_name() -> None:
    store = memory_store()
    store.set("beat/1", "5:7")
    store.inner.set("left/1", b"1" * 33)
    store.inner.set("beat/2", store.inner.get("beat/1"))
    stranger = SignedStore(store.inner, b"another secret..")
    stranger.set("failure", "all is lost")
    for key in ("left/1", "beat/2", "failure"):
        with pytest.raises(
            NodeLost, match=rf"a value \({key}\) that was not signed with their secret: \$EVENER_SECRET"
        ):
            store.check([key])


def test_gloo_connects_through_signed_addresses() -> None:
    store = memory_store()

    def sum_of(rank: int) -> list[float]:
        place = store.under("gloo")
        group = stores.ProcessGroupGloo(place, rank, 2, timedelta(seconds=20))
        tensor = torch.tensor([1.0 + rank])
        group.allreduce([tensor]).wait()
        found: list[float] = tensor.tolist()
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(sum_of, range(2))) == [[3.0]] * 2
    assert store.num_keys() > 0


def test_wait_for_a_value_ends_when_no_longer_needed() -> None:
    store, over = memory_store(), threading.Event()
    waiting = store.under("run").until(over.is_set)
    with ThreadPoolExecutor(2) as threads:
        came, never_comes = threads.submit(waiting.get, "a"), threads.submit(waiting.get, "b")
        time.sleep(0.05)
        store.set("run/a", "1")
        assert came.result(timeout=5) == b"1"
        waiting.wait(["a"], timedelta(milliseconds=1))  # it is there, however busy the machine
        with pytest.raises(RuntimeError, match=r"run/c did not come within 0\.02 s"):
            waiting.wait(["c"], timedelta(seconds=0.02))
        over.set()
        with pytest.raises(NodeLost):
            never_comes.result(timeout=5)
