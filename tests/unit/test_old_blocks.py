"""Whether the device may hold blocks from before a reset, by vLLM's reports. Needs no vLLM."""

from __future__ import annotations

from kvtier.adapters.vllm._old_blocks import OldBlocks


def after_reset(*holders: str, preempted: tuple[str, ...] = (), loading: tuple[str, ...] = ()) -> OldBlocks:
    blocks = OldBlocks()
    for req_id in holders:
        blocks.note_blocks(req_id)
    blocks.reset(loading)
    assert blocks.may_store("a") is (None if holders or loading else True)
    blocks.step_ended(preempted)
    return blocks


def test_reset_needs_preemption() -> None:
    assert after_reset().may_store("new")
    assert after_reset("a", "b", preempted=("a", "b")).may_store("a")
    for failed in (after_reset("a", "b", preempted=("a",)), after_reset(loading=("ended",))):
        assert not failed.may_store("a")
        assert not failed.may_store("new")
        failed.step_ended(["b"])  # it attaches to its old blocks again
        assert not failed.may_store("b")


def test_next_reset_decides_anew() -> None:
    blocks = after_reset("a", "b")
    blocks.ended("a")
    blocks.reset(())
    blocks.step_ended(["b"])
    assert blocks.may_store("b")


def test_earlier_preemption_is_no_proof() -> None:
    blocks = OldBlocks()
    blocks.note_blocks("a")
    blocks.step_ended(["a"])
    blocks.reset(())
    assert blocks.step_ended([]) == 0
    assert not blocks.may_store("a")
    assert blocks.may_store("new")
    blocks.ended("a")
    assert blocks.may_store("a"), "another one of this name"
