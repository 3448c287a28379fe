"""The checker of compiled loops, tried on loops known to be good and on loops known to be bad.

A checker that finds nothing proves nothing, so every bad way to carry a cache has its case here, compiled by
each XLA that is at hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import hlo, topologies

BATCH, HEADS, SLOTS, WIDTH = 2, 2, 64, 8
CACHE_ELEMENTS = BATCH * HEADS * SLOTS * WIDTH

TEXT = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (2, {}, may-alias), {1, 0}: (0, {}) }

FileNames
1 "not } an (instruction"

%update (p0: f32[4,8], p1: f32[1,8], p2: s32[]) -> f32[4,8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = f32[1,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %view = f32[4,8]{1,0} bitcast(%p0)
  %dus = f32[4,8]{1,0} dynamic-update-slice(%view, %p1, %p2, %zero)
  ROOT %whole = f32[4,8]{1,0} bitcast(%dus)
}

%shift (q0: f32[4,8], q1: s32[]) -> f32[4,8] {
  %q0 = f32[4,8]{1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %last = f32[1,8]{1,0} slice(%q0), slice={[3:4], [0:8]}
  ROOT %dus2 = f32[4,8]{1,0} dynamic-update-slice(%q0, %last, %q1, %q1)
}

%skip (s: (f32[4,8])) -> (f32[4,8]) {
  %s = (f32[4,8]{1,0}) parameter(0)
  %old = f32[4,8]{1,0} get-tuple-element(%s), index=0
  %copied = f32[4,8]{1,0} copy(%old)
  ROOT %out = (f32[4,8]{1,0}) tuple(%copied)
}

%body (c: (s32[], f32[4,8], /*index=2*/f32[1,8])) -> (s32[], f32[4,8], f32[1,8]) {
  %c = (s32[], f32[4,8]{1,0}, /*index=2*/f32[1,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %k = f32[4,8]{1,0:T(8,128)S(1)} get-tuple-element(%c), index=1
  %row = f32[1,8]{1,0} get-tuple-element(%c), index=2
  %good = f32[4,8]{1,0} fusion(f32[4,8]{1,0} %k, %row, %i), calls=%update, metadata={op_name="a(b, c)"}
  %bad = f32[4,8]{1,0} fusion(%good, %i), kind=kLoop, calls=%shift
  %arg = (f32[4,8]{1,0}) tuple(%bad)
  %branch = (f32[4,8]{1,0}) conditional(%i, %arg, %arg), branch_computations={%skip, %skip}
  %chosen = f32[4,8]{1,0} get-tuple-element(%branch), index=0
  %kernel = (f32[4,8]{1,0}, f32[1,8]{1,0}) custom-call(%row, %chosen), custom_call_target="tide \\"k\\", x", \
output_to_operand_aliasing={{0}: (1, {})}
  %fresh = f32[4,8]{1,0} custom-call(%row), custom_call_target="make"
  ROOT %next = (s32[], f32[4,8]{1,0}, f32[1,8]{1,0}) tuple(%i, %fresh, %row)
}

%while_condition (d: (s32[], f32[4,8], f32[1,8])) -> pred[] {
  %d = (s32[], f32[4,8]{1,0}, f32[1,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: s32[], b: f32[4,8], e: f32[1,8]) -> (s32[], f32[4,8], f32[1,8]) {
  %a = s32[] parameter(0)
  %b = f32[4,8]{1,0} parameter(1)
  %e = f32[1,8]{1,0} parameter(2)
  %once = f32[4,8]{1,0} copy(%b)
  %start = (s32[], f32[4,8]{1,0}, f32[1,8]{1,0}) tuple(%a, %once, %e)
  ROOT %while = (s32[], f32[4,8]{1,0}, f32[1,8]{1,0}) while(%start), condition=%while_condition, body=%body
}
"""


def write(cache, rows, at):
    """`rows` [B, n, 1, w] put into `cache` [B, n, S, w], each batch row at its own position."""

    def one(cache, rows, at):
        return jax.lax.dynamic_update_slice(cache, rows, (0, at, 0))

    return jax.vmap(one)(cache, rows.astype(cache.dtype), at)


def attend(caches, at, x):
    """`x` after attention over the slots before `at`: the read that a write has to be ordered with."""
    scores = jnp.einsum("bhtd,bhsd->bhts", x.astype(caches["k"].dtype), caches["k"])
    open_slots = (jnp.arange(SLOTS) < at[:, None])[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(open_slots, scores, -1e4))
    return x + jnp.einsum("bhts,bhsd->bhtd", weights, caches["v"]).astype(x.dtype)


def new_rows(x):
    """Key and value rows made from `x`; two functions, so that XLA cannot merge the two caches."""
    return {"k": jnp.sin(x), "v": jnp.cos(x)}


def write_all(caches, rows, at):
    return jax.tree.map(lambda cache, row: write(cache, row, at), caches, rows)


def good(caches, at, x):
    """The branches return rows; the caches are written after the cond."""

    def run(x):
        x = attend(caches, at, x)
        return new_rows(x), x

    rows, x = jax.lax.cond(x[0, 0, 0, 0] > 0, run, lambda x: ({"k": x, "v": x}, x), x)
    return write_all(caches, rows, at), x


def through_cond(caches, at, x):
    """The caches come out of the cond."""

    def run(carry):
        caches, x = carry
        x = attend(caches, at, x)
        return write_all(caches, new_rows(x), at), x

    return jax.lax.cond(x[0, 0, 0, 0] > 0, run, lambda carry: carry, (caches, x))


def by_where(caches, at, x):
    """The row is chosen by a mask over the whole cache."""
    x = attend(caches, at, x)
    hit = (jnp.arange(SLOTS) == at[:, None])[:, None, :, None]
    return jax.tree.map(lambda cache, row: jnp.where(hit, row, cache), caches, new_rows(x)), x


def transposed(caches, at, x):
    """The keys change places in every step, so no layout of the carry makes the transpose free."""
    x = attend(caches, at, x)
    caches = write_all(caches, new_rows(x), at)
    return {"k": caches["k"].swapaxes(2, 3).reshape(caches["k"].shape), "v": caches["v"]}, x


def converted(caches, at, x):
    """The write goes through another dtype."""
    x = attend(caches, at, x)
    wide = jax.tree.map(lambda cache: cache.astype(jnp.float32), caches)
    wide = write_all(wide, new_rows(x), at)
    return jax.tree.map(lambda cache, old: cache.astype(old.dtype), wide, caches), x


def compiled_text(backend, step, dtype=jnp.float32, donate=True):
    """The optimized HLO of a loop of eight steps over caches, donated unless told otherwise."""

    def loop(caches, at, x):
        def body(carry):
            i, caches, at, x = carry
            caches, x = step(caches, at, x)
            return i + 1, caches, at + 1, x

        return jax.lax.while_loop(lambda carry: carry[0] < 8, body, (0, caches, at, x))[1:]

    cache = jax.ShapeDtypeStruct((BATCH, HEADS, SLOTS, WIDTH), dtype)
    at = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    x = jax.ShapeDtypeStruct((BATCH, HEADS, 1, WIDTH), jnp.float32)
    args = ({"k": cache, "v": cache}, at, x)
    return topologies.compile_for(backend, loop, *args, donate_argnums=(0,) if donate else ()).as_text()


@pytest.fixture(params=["cpu", pytest.param("h200", marks=pytest.mark.portability)])
def backend(request):
    """Each XLA in turn."""
    topologies.require(request.param)
    return request.param


def test_rows_out_of_the_cond_leave_the_caches_in_place(backend):
    text = compiled_text(backend, good)
    assert hlo.cache_sized_ops(text, CACHE_ELEMENTS) == []
    assert len(hlo.conditionals_in_loops(text)) == 1
    assert hlo.donated(text) == {0, 1}
    assert hlo.undonated(text, CACHE_ELEMENTS) == []
    assert hlo.host_ops_in_loops(text) == []


def test_caches_that_are_not_donated_are_found(backend):
    text = compiled_text(backend, good, donate=False)
    assert [i.args for i in hlo.undonated(text, CACHE_ELEMENTS)] == [("0",), ("1",)]
    assert hlo.undonated(text, CACHE_ELEMENTS + 1) == []


def test_a_callback_in_the_loop_is_found():
    """On a CPU, for JAX lowers no callback for a device that is not there."""

    def watched(caches, at, x):
        jax.debug.callback(lambda value: None, x[0, 0, 0, 0])
        return good(caches, at, x)

    (finding,) = hlo.host_ops_in_loops(compiled_text("cpu", watched))
    assert "callback" in str(finding)


def product(x, weights):
    return jnp.tanh(x @ weights)


def product_of_widened(x, weights):
    """The wide copy is also a result, so that it cannot be made piece by piece."""
    wide = weights.astype(jnp.float32)
    return jnp.tanh(x.astype(jnp.float32) @ wide), wide


@pytest.mark.portability
@pytest.mark.parametrize(("fn", "held"), [(product, False), (product_of_widened, True)])
@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_weights_held_twice_are_found(target, fn, held):
    topologies.require(target)
    args = (jax.ShapeDtypeStruct((8, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 256), jnp.bfloat16))
    text = topologies.compile_for(target, fn, *args).as_text()
    assert [finding.reason for finding in hlo.widened(text, 512 * 256)] == (
        ["holds 16-bit weights as float32"] if held else []
    )
    assert hlo.widened(text, 512 * 256 + 1) == []


def test_a_cpu_holds_16_bit_weights_twice():
    """Which is why DESIGN states bounds of memory on a CPU for float32 only (law 13)."""
    args = (jax.ShapeDtypeStruct((8, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 512), jnp.bfloat16))

    def loop(x, weights):
        return jax.lax.fori_loop(0, 4, lambda _, x: product(x, weights), x)

    assert hlo.widened(topologies.compile_for("cpu", loop, *args).as_text(), 512 * 512)
    wide = [jax.ShapeDtypeStruct(arg.shape, jnp.float32) for arg in args]
    assert hlo.widened(topologies.compile_for("cpu", loop, *wide).as_text(), 512 * 512) == []


def test_temporaries_within_the_bound_and_above():
    """The scores of attention fit; a second copy of what they are made from does not."""
    heads, slots, width = 4, 4096, 64
    bound = hlo.temporaries_bound(batch=1, columns=1, vocab=16, ffn=16, heads=heads, slots=slots, itemsize=4)
    assert bound == 1.2 * (16 * 4 + 3 * heads * slots * 4)
    query = jax.ShapeDtypeStruct((heads, width), jnp.float32)
    keys = jax.ShapeDtypeStruct((heads, slots, width), jnp.float32)

    def lean(query, keys):
        return jax.nn.softmax(jnp.einsum("hd,hsd->hs", query, keys)).max(axis=-1)

    def wasteful(query, keys):
        return lean(query, jax.lax.optimization_barrier(jnp.sin(keys)))

    used = [
        topologies.compile_for("cpu", fn, query, keys).memory_analysis().temp_size_in_bytes for fn in (lean, wasteful)
    ]
    assert used[0] <= bound < used[1]


def test_bfloat16_caches_stay_in_place_on_a_gpu_only(backend):
    """XLA:CPU has no bfloat16 scatter: every step converts the whole cache to float32 and back."""
    findings = hlo.cache_sized_ops(compiled_text(backend, good, jnp.bfloat16), CACHE_ELEMENTS)
    assert any("bf16[2,2,64,8]" in str(f) and "convert" in str(f) for f in findings) == (backend == "cpu")
    assert backend == "cpu" or findings == []


@pytest.mark.parametrize(
    ("step", "dtype", "words"),
    [
        (through_cond, jnp.float32, ["a conditional returns a cache"]),
        (by_where, jnp.float32, ["ends in select"]),
        (transposed, jnp.float32, ["ends in transpose", "ends in copy"]),
        (converted, jnp.float16, ["ends in convert"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_cache_that_is_moved_is_found(backend, step, dtype, words):
    findings = hlo.cache_sized_ops(compiled_text(backend, step, dtype), CACHE_ELEMENTS)
    assert any(word in str(finding) for word in words for finding in findings), list(map(str, findings))


def test_text_findings():
    assert [str(finding) for finding in hlo.cache_sized_ops(TEXT, 32)] == [
        "skip / copied: f32[4,8]{1,0} copy (writes a whole cache)",
        "body / bad: f32[4,8]{1,0} fusion (fusion updates q0 in place and reads it elsewhere)",
        "body / branch: (f32[4,8]{1,0}) conditional (a conditional returns a cache)",
        "body / fresh: f32[4,8]{1,0} custom-call (writes a whole cache)",
    ]
    assert hlo.cache_sized_ops(TEXT, 33) == []


def test_text_of_the_host():
    assert hlo.host_ops_in_loops(TEXT) == []
    spoilt = TEXT.replace(
        "  ROOT %next =",
        """\
  %sent = (f32[1,8]{1,0}, u32[], token[]) send(%row, %i), channel_id=1, is_host_transfer=true
  %said = f32[1,8]{1,0} custom-call(%row), custom_call_target="xla_ffi_python_cpu_callback"
  %far = f32[4,8]{1,0:S(5)} copy(%k)
  %near = f32[4,8]{1,0:T(8,128)S(1)} copy(%k)
  ROOT %next =""",
    )
    assert [finding.instruction for finding in hlo.host_ops_in_loops(spoilt)] == ["sent", "said", "far"]
    # Before the loop the host may do as it likes.
    outside = TEXT.replace("%once = f32[4,8]{1,0} copy(%b)", "%once = f32[4,8]{1,0:S(5)} copy(%b)")
    assert hlo.host_ops_in_loops(outside) == []


def test_text_of_weights():
    halves = TEXT.replace("f32[4,8]{1,0} parameter(1)", "bf16[4,8]{1,0} parameter(1)")
    assert hlo.widened(halves, 32) == []
    direct = halves.replace("copy(%b)", "convert(%b)")
    assert [finding.instruction for finding in hlo.widened(direct, 32)] == ["once"]
    assert hlo.widened(direct, 33) == []
    # The same conversion of float32 weights of that size is not one of 16-bit weights.
    assert hlo.widened(TEXT.replace("copy(%b)", "convert(%b)"), 32) == []


def test_text_counts():
    assert hlo.count(TEXT, "dynamic-update-slice") == 2
    assert hlo.count(TEXT, "copy") == 2
    assert [i.called for i in hlo.conditionals_in_loops(TEXT)] == [("skip", "skip")]
    assert hlo.custom_call_targets(TEXT) == {'tide \\"k\\", x': 1, "make": 1}
    assert hlo.donated(TEXT) == {0, 2}


def test_text_instructions():
    body = hlo.parse(TEXT).computations["body"]
    assert body.root == "next"
    assert body.instructions["c"].elements == (1, 32, 8)
    assert body.instructions["good"].args == ("k", "row", "i")
    assert body.instructions["good"].attributes["metadata"] == '{op_name="a(b, c)"}'
    assert body.instructions["kernel"].aliased_outputs == {"0"}
    assert hlo.parse(TEXT).entry == "main"
    assert [i.name for i in hlo.parse(TEXT).parameters()] == ["a", "b", "e"]
    assert body.instructions["kernel"].arrays == (("f32", 32), ("f32", 8))
    assert hlo.parse(TEXT).computations["main"].instructions["while"].called == ("body", "while_condition")


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no computation"):
        hlo.parse("module @jit_f { }")


@pytest.mark.parametrize(
    ("sharing", "found"),
    [
        (("model", None), []),  # rows of a matrix: a sum over devices
        ((None, "model"), []),  # its columns: nothing, where the result stays cut
        ((None, None), []),  # whole on every device
        ("gathered", ["all-gather"]),
    ],
)
@pytest.mark.parametrize("target", ["cpu", pytest.param("h200", marks=pytest.mark.portability)])
def test_a_gathered_matrix_is_found(target, sharing, found):
    topologies.require(target)
    mesh = Mesh(np.array(topologies.devices(target, 4)), ("model",))
    cut = P("model", None) if sharing == "gathered" else P(*sharing)

    def product(x, w):
        if sharing == "gathered":
            w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return x @ w

    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, place))
        for shape, place in (((8, 64), P(None, cut[0] if sharing != "gathered" else None)), ((64, 32), cut))
    ]
    text = topologies.compile_for(target, product, *args, mesh=mesh).as_text()
    assert [finding.opcode.removesuffix("-start") for finding in hlo.redistributed(text, 64 * 32)] == found
    assert hlo.redistributed(text, 64 * 32 + 1) == []
