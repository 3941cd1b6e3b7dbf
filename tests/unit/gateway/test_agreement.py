"""Which workers get work here, and what is said of the others."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from common.messages import Region, WorkerState
from common.pages import KVGroup, KVLayout, PagePart
from common.peers import Peers
from common.words import Keeps, Role, WorkerStatus
from gateway.answers.catalogue import Catalogue
from gateway.placement.agreement import Agreement, Blocks, Own
from gateway.placement.incumbents import BEFORE_S, REMEMBERED_S, Incumbents, mark
from gateway.request.placement import Difference, Unlike
from tests.fakes.workers import LAYOUT, a_worker

OURS = {"model": "tokenizer"}  # what `a_worker` says


class Here:
    """A gateway's view of workers that beat once."""

    def __init__(
        self,
        *states: WorkerState,
        tokenizers: dict[str, str] | None = None,
        own: dict[str, Own] | None = None,
        written: dict[str, str] | None = None,
    ) -> None:
        self.now = 0.0
        self.peers = Peers(clock=lambda: self.now)
        self.hear(*states)
        serves = {name: Own(tokenizer=one) for name, one in (OURS if tokenizers is None else tokenizers).items()}
        self.incumbents = Incumbents(written=written or {}, clock=lambda: self.now)
        self.agreement = Agreement(self.peers, own or serves, self.incumbents)
        self.catalogue = Catalogue(cast(Any, dict.fromkeys(own or serves)), self.agreement)  # it reads no text

    def hear(self, *states: WorkerState) -> None:
        for state in states:
            self.peers.saw(state)

    @property
    def differences(self) -> list[Difference]:
        return self.agreement.differences()

    @property
    def refused(self) -> dict[str, Unlike]:
        return {one.worker: one.what for one in self.differences}

    def ready(self, role: Role = Role.DECODE) -> list[str]:
        return [state.worker for state in self.agreement.ready(role)]


def region(layout: KVLayout = LAYOUT, *, transport: str = "shm", reach: str | None = None) -> dict[str, Any]:
    address = {} if reach is None else {"reach": reach}
    return {"region": Region(transport=transport, incarnation=1, layout=layout, address=address)}


def test_workers_of_two_widths_share_blocks() -> None:
    first = PagePart(layers=2, planes=2, heads=1, first_head=0, all_heads=2, dim=8, dtype="float32")
    whole, ranks = (
        msgspec.structs.replace(LAYOUT, num_layers=2, num_kv_heads=2, head_dim=8),
        msgspec.structs.replace(LAYOUT, num_layers=2, num_kv_heads=1, head_dim=8, parts=(first,)),
    )
    here = Here(a_worker("d0", "decode", **region(whole)), a_worker("p0", "prefill", **region(ranks)))
    assert (here.ready(), here.ready(Role.PREFILL), here.differences) == (["d0"], ["p0"], [])
    one, two = (Blocks.of(a_worker("w", "decode", **region(layout))) for layout in (whole, ranks))
    assert (one.name, one.kind.root()) == (two.name, two.kind.root())


def test_workers_with_the_gateways_tokenizer_or_none_that_is_told_get_work() -> None:
    here = Here(a_worker("d0", "decode"), a_worker("d1", "decode", tokenizer_fingerprint=""), a_worker("p0", "prefill"))
    assert (here.ready(), here.ready(Role.PREFILL), here.differences) == (["d0", "d1"], ["p0"], [])


def test_a_worker_with_another_tokenizer_gets_none() -> None:
    here = Here(a_worker("d0", "decode", tokenizer_fingerprint="0123456789"), a_worker("p0", "prefill"))
    assert here.ready() == []
    assert here.catalogue.fingerprint("model") == ""
    [one] = here.differences
    assert (one.worker, one.what, one.decodes) == ("d0", Unlike.TOKENIZER, True)
    assert one.text == (
        "its tokenizer.json (01234567) is not this gateway's for 'model' (tokenize): start both with the same model folder"
    )


def test_other_gateways_models_on_the_bus_are_no_difference() -> None:
    others = [a_worker("x0", "decode", model="other", model_fingerprint="other", tokenizer_fingerprint="other")]
    here = Here(a_worker("d0", "decode"), *others)
    assert here.refused == {}
    here = Here(a_worker("d0", "decode"), *others, tokenizers={"model": "tokenizer", "second": "tokenizer"})
    assert here.refused == {}
    assert here.catalogue.fingerprint("model") == "model"


def test_each_model_has_its_own_tokenizer() -> None:
    workers = [
        a_worker(f"{name}-{token}", "decode", model=name, tokenizer_fingerprint=token)
        for name in "ab"
        for token in "ab"
    ]
    here = Here(*workers, tokenizers={"a": "a", "b": "b"})
    assert here.ready() == ["a-a", "b-b"]
    assert here.refused == {"a-b": Unlike.TOKENIZER, "b-a": Unlike.TOKENIZER}


def test_models_that_nobody_here_is_called_by_are_named() -> None:
    here = Here(a_worker("x", "decode", model="other"))
    assert here.refused == {"x": Unlike.MODEL}
    assert here.differences[0].text == (
        "it serves 'other', and nobody 'model': give the worker --served-model-name model, "
        "or the gateway --worker-models other, if that is the same model"
    )
    assert (here.ready(), here.catalogue.fingerprint("model")) == ([], "")
    here.hear(a_worker("d0", "decode"))
    assert (here.refused, here.ready(), here.catalogue.fingerprint("model")) == ({}, ["d0"], "model")


def test_workers_may_call_a_model_otherwise_where_the_gateway_says_how() -> None:
    here = Here(
        a_worker("x", "decode", model="other"),
        a_worker("d0", "decode"),
        own={"model": Own(tokenizer="tokenizer", called="other")},
    )
    assert (here.ready(), here.catalogue.fingerprint("model"), here.refused) == (["x"], "model", {})


def test_only_workers_with_the_gateways_own_files_get_work() -> None:
    """Also where they are most, or alone. Who doesn't tell, as an older release, is taken to have them."""
    own = {"model": Own(tokenizer="tokenizer", files="ours" * 8)}
    foreign = [a_worker(name, "decode", model_fingerprint="a", files_fingerprint="theirs" * 5) for name in "xyz"]
    here = Here(*foreign, own=own)
    assert (here.ready(), here.catalogue.fingerprint("model")) == ([], "")
    assert here.differences[0].text == (
        "its files of 'model' (theirsth) are not this gateway's (oursours): start both with the same model folder"
    )
    here.hear(
        a_worker("d0", "decode", model_fingerprint="m", files_fingerprint="ours" * 8),
        a_worker("d1", "decode", model_fingerprint="m"),
    )
    assert (here.ready(), here.catalogue.fingerprint("model")) == (["d0", "d1"], "m")
    assert here.refused == dict.fromkeys("xyz", Unlike.WEIGHTS)


WINDOWED = KVGroup(keeps=Keeps.WINDOW, parts=(), blocks_per_entry=2, window=64)


def other_layout(**changes: Any) -> dict[str, Any]:
    return region(msgspec.structs.replace(LAYOUT, **changes))


LATER_DTYPE = KVLayout.of(
    [
        PagePart(layers=1, planes=2, heads=1, dim=8, dtype="float32"),
        PagePart(layers=1, planes=1, heads=1, dim=8, dtype="float16"),
    ],
    num_blocks=100,
    block_size=16,
)


OTHERS = [{"model_fingerprint": "a-before-model"}, other_layout(dtype="bfloat16")]


@pytest.mark.parametrize("others", OTHERS)
def test_what_served_before_wins_a_tie(others: dict[str, Any]) -> None:
    """The newcomer would win by its name and by the alphabet."""
    here = Here(a_worker("d0", "decode"))
    assert here.refused == {}
    here.now = BEFORE_S
    here.hear(a_worker("c0", "decode", incarnation=0, **others))
    assert list(here.refused) == ["c0"]
    here.hear(a_worker("d0", "decode", status=WorkerStatus.STOPPED))
    assert here.refused == {}  # it is the only one, for as long as the other takes to come again
    here.now += REMEMBERED_S / 2
    for state in (a_worker("c0", "decode", incarnation=0, **others), a_worker("d0", "decode", incarnation=2)):
        here.hear(state)
    assert list(here.refused) == ["c0"]
    here.hear(a_worker("c1", "decode", **others))
    assert list(here.refused) == ["d0"]  # most have it now: that is a change


@pytest.mark.parametrize("others", OTHERS)
def test_a_gateway_that_starts_goes_by_what_was_written_down_else_by_age(others: dict[str, Any]) -> None:
    older, newer = a_worker("c0", "decode", incarnation=5, **others), a_worker("d0", "decode", incarnation=7)
    for states in ((older, newer), (newer, older)):
        assert list(Here(*states).refused) == ["d0"]
    before = Here(newer)
    assert before.refused == {}
    for states in ((older, newer), (newer, older)):
        here = Here(*states, written=before.incumbents.marks)
        assert list(here.refused) == ["c0"]


def test_a_group_that_left_long_ago_comes_as_a_new_one() -> None:
    here = Here(a_worker("d0", "decode"), written={"weights of model": mark("model")})
    assert here.refused == {}
    here.hear(a_worker("d0", "decode", status=WorkerStatus.STOPPED))
    here.now = REMEMBERED_S + 1
    here.hear(a_worker("c0", "decode", model_fingerprint="a"))
    assert here.refused == {}
    here.now += 1
    here.hear(a_worker("d0", "decode", incarnation=2))
    assert list(here.refused) == ["d0"]


@pytest.mark.parametrize(
    ("changes", "what", "says"),
    [
        (
            {"model_fingerprint": "older"},
            Unlike.WEIGHTS,
            "(older) are not those of most or the first workers (model): start it with",
        ),
        (
            {"model_fingerprint": "apart"} | other_layout(groups=(WINDOWED,)),
            Unlike.WEIGHTS,
            "with their model folder, --quantization, --max-model-len and --disable-hybrid-kv-cache-manager.",
        ),
        (
            other_layout(block_size=32),
            Unlike.BLOCKS,
            "its blocks have 32 positions, those of most or the first workers 16",
        ),
        (
            other_layout(dtype="bfloat16"),
            Unlike.BLOCKS,
            "its KV is bfloat16, that of most or the first workers float32",
        ),
        (
            other_layout(dtype="float8_e4m3fn"),
            Unlike.BLOCKS,
            "its KV is fp8, that of most or the first workers float32",
        ),
        (other_layout(num_kv_heads=2), Unlike.BLOCKS, "what its blocks hold differs"),
        (region(LATER_DTYPE), Unlike.BLOCKS, "what its blocks hold differs"),  # their block hashes are the same
        (region(transport="ucx"), Unlike.TRANSPORT, "by ucx, by which it reaches no decode worker"),
        (region(reach="host-2"), Unlike.TRANSPORT, "ucx between hosts"),
        ({"parity_hash": b"other"}, Unlike.HASHES, "it hashes blocks otherwise than this gateway"),
    ],
)
def test_a_prefill_worker_that_can_t_serve_the_decode_workers_says_why(
    changes: dict[str, Any], what: Unlike, says: str
) -> None:
    decode = [a_worker(name, "decode", **region(reach="host-1")) for name in ("d0", "d1")]
    here = Here(*decode, a_worker("p0", "prefill", **changes), a_worker("p1", "prefill", **region(reach="host-1")))
    [one] = here.differences
    assert (one.worker, one.what, one.decodes) == ("p0", what, False)
    assert says in f"{one.text}."
    assert ":" in one.text  # then the remedy


def test_decode_workers_of_a_minority_are_named_too_and_other_statuses_are_not() -> None:
    few = a_worker("d2", "decode", **other_layout(block_size=32))
    here = Here(a_worker("d0", "decode"), a_worker("d1", "decode"), few)
    assert here.refused == {"d2": Unlike.BLOCKS}
    here.hear(msgspec.structs.replace(few, status=WorkerStatus.DRAINING))
    assert here.refused == {}


def test_a_name_that_two_processes_have_is_told_until_one_is_gone() -> None:
    lives = [a_worker("d0", "decode", incarnation=number) for number in (1, 2)]
    here = Here(*lives, *lives)
    assert (here.refused, here.ready()) == ({"d0": Unlike.NAME}, [])
    here.now = 4.0
    assert (here.refused, here.ready()) == ({}, ["d0"])


def test_a_worker_that_came_again_with_another_tokenizer_is_looked_at_anew() -> None:
    here = Here(a_worker("d0", "decode", tokenizer_fingerprint="other"))
    assert here.ready() == []
    here.hear(a_worker("d0", "decode", incarnation=2))
    assert here.ready() == ["d0"]


def test_a_difference_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    here = Here(a_worker("d0", "decode"), a_worker("d1", "decode", tokenizer_fingerprint="other"))
    for _ in range(3):
        here.agreement.tell()
    here.hear(a_worker("d1", "decode", tokenizer_fingerprint="other", incarnation=2))
    here.now = 4.0  # no longer a change of lives
    here.hear(a_worker("d1", "decode", tokenizer_fingerprint="other", incarnation=2))
    here.agreement.tell()
    logged = [(record.msg, record.__dict__["worker"], record.__dict__.get("what")) for record in caplog.records]
    assert [entry for entry in logged if entry[0] == "worker.refused"] == [("worker.refused", "d1", "tokenizer")] * 2


def test_workers_of_a_model_that_came_later_get_work_until_it_goes() -> None:
    here = Here(a_worker("d0", "decode"), a_worker("d1", "decode", model="later", model_fingerprint="its"))
    assert (here.ready(), here.agreement.weights("later")) == (["d0"], "")
    here.agreement.add("later", Own(tokenizer="tokenizer"))
    assert (here.ready(), here.agreement.weights("later")) == (["d0", "d1"], "its")
    here.agreement.drop("later")
    assert (here.ready(), here.agreement.weights("later")) == (["d0"], "")
