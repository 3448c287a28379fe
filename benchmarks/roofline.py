"""What a decode step must read and compute, and so how long it takes at least: arithmetic, no measurement.

A step of T columns per row takes at least max(bytes / bandwidth, operations / rate). Bytes are the weights of the
layers that ran, once for all rows, and of every row its K/V cache at those layers; operations are two for every weight
and column, and four for every slot that a query attends to. Activations are left out, and so are launches, whose time
nothing here knows. The rate is that of dense 16-bit products; weights of 8 and 4 bits are taken to be widened on the
way, so that they save bytes and no operations.

On a GPU every predicate that the host must read costs a round trip. That time is a parameter, `sync`, 0 unless given:
nothing here has measured it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip by its maker's data sheet.

    Attributes:
        name: of the chip.
        bandwidth: of its memory, bytes/s.
        rate: dense bfloat16 operations/s.
        memory: bytes.
        host_predicates: the host reads the predicate of every conditional and loop, unless XLA captures them.
    """

    name: str
    bandwidth: float
    rate: float
    memory: float
    host_predicates: bool


CHIPS = {
    "a100": Chip(name="A100 SXM 80 GB", bandwidth=2.039e12, rate=312e12, memory=80e9, host_predicates=True),
    "h100": Chip(name="H100 SXM 80 GB", bandwidth=3.35e12, rate=989e12, memory=80e9, host_predicates=True),
    "h200": Chip(name="H200 SXM 141 GB", bandwidth=4.8e12, rate=989e12, memory=141e9, host_predicates=True),
    "v5e": Chip(name="TPU v5e", bandwidth=0.819e12, rate=197e12, memory=16e9, host_predicates=False),
    "v6e": Chip(name="TPU v6e", bandwidth=1.64e12, rate=918e12, memory=32e9, host_predicates=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder by its sizes; weights, states and caches have two bytes an element.

    Attributes:
        layers: L.
        hidden: width of the states.
        ffn: width of the gated MLP.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of one.
        vocab: tokens; the LM head is a matrix of its own, or the embedding: it is read either way.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads) + 3 * self.hidden * self.ffn

    @property
    def head_weights(self) -> int:
        """Elements of the LM head."""
        return self.hidden * self.vocab

    @property
    def slot_elements(self) -> int:
        """Elements of a K and a V row of one layer."""
        return 2 * self.kv_heads * self.head_dim


LLAMA_8B = Shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128_256)
SMOLLM2 = Shape(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49_152)
BYTES = 2.0  # of an element of weights and caches
TWINS = {8: 1.0, 4: 0.5 + 4 / 64}  # bytes an element: 4 bits go with a scale and an offset of 2 bytes for every 64


@dataclasses.dataclass(frozen=True)
class Work:
    """What something reads and computes.

    Attributes:
        bytes: from memory.
        operations: additions and multiplications.
    """

    bytes: float
    operations: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def __mul__(self, times: float) -> "Work":
        return Work(self.bytes * times, self.operations * times)

    def seconds(self, chip: Chip) -> float:
        """The least time on this chip."""
        return max(self.bytes / chip.bandwidth, self.operations / chip.rate)


def layer(shape: Shape, *, batch: int, context: int, columns: int = 1, weight_bytes: float = BYTES) -> Work:
    """One layer for `columns` positions of `batch` rows that have `context` positions in their caches each."""
    positions = batch * columns
    weights = Work(shape.layer_weights * weight_bytes, 2 * shape.layer_weights * positions)
    slots = batch * context * shape.slot_elements * BYTES  # read once for all columns of a row
    return weights + Work(slots, 4 * shape.heads * shape.head_dim * context * positions)


def projected(shape: Shape, *, batch: int) -> Work:
    """What a layer that is not run still owes to later tokens: the K/V projections of the held state."""
    weights = shape.hidden * shape.slot_elements
    return Work(weights * BYTES, 2 * weights * batch)


def head(shape: Shape, *, batch: int, columns: int = 1) -> Work:
    """The LM head."""
    return Work(shape.head_weights * BYTES, 2 * shape.head_weights * batch * columns)


def exit_point(shape: Shape, *, batch: int, bottleneck: int = 128) -> Work:
    """A router, in float32, at one exit point."""
    weights = shape.hidden * bottleneck
    return Work(weights * 4, 2 * weights * batch)


def step(shape: Shape, *, batch: int, context: int, depth: int | None = None, columns: int = 1) -> Work:
    """A step that leaves after `depth` layers (None: runs all) and projects the K/V of the others."""
    depth = shape.layers if depth is None else depth
    ran = layer(shape, batch=batch, context=context, columns=columns) * depth
    return (
        ran
        + projected(shape, batch=batch * columns) * (shape.layers - depth)
        + head(shape, batch=batch, columns=columns)
    )


def exits_speedup(shape: Shape, chip: Chip, *, batch: int, context: int, depth: int, points: int, sync: float) -> float:
    """Full depth against leaving at `depth` always, with `points` exit points tested, each a predicate.

    Raises:
        ValueError: no such depth.
    """
    if not 1 <= depth < shape.layers:
        raise ValueError(f"depth {depth} is not an exit of {shape.layers} layers.")
    waiting = sync * points if chip.host_predicates else 0.0
    full = step(shape, batch=batch, context=context).seconds(chip)
    work = step(shape, batch=batch, context=context, depth=depth) + exit_point(shape, batch=batch) * points
    return full / (work.seconds(chip) + waiting)


def worthwhile(shape: Shape, chip: Chip, *, batch: int, context: int, skipped: int, sync: float) -> float:
    """The least probability, of all rows leaving together, at which one exit point pays; above 1: it never does."""
    saved = (layer(shape, batch=batch, context=context) * skipped).seconds(chip)
    owed = (projected(shape, batch=batch) * skipped).seconds(chip)
    cost = exit_point(shape, batch=batch).seconds(chip) + (sync if chip.host_predicates else 0.0)
    return cost / (saved - owed)


def expected_tokens(acceptance: float, width: int) -> float:
    """Tokens of a round that verifies `width` columns, of which each draft is right with the same probability."""
    return sum(acceptance**drafted for drafted in range(width))


def lookup_speedup(shape: Shape, chip: Chip, *, batch: int, context: int, width: int, acceptance: float) -> float:
    """Full depth against verifying drafts that cost nothing.

    Rows advance by their own counts; the batch waits for none.
    """
    plain = step(shape, batch=batch, context=context).seconds(chip)
    verified = step(shape, batch=batch, context=context, columns=width).seconds(chip)
    return expected_tokens(acceptance, width) * plain / verified


def draft_speedup(
    shape: Shape, chip: Chip, *, batch: int, context: int, width: int, acceptance: float, depth: int, sync: float
) -> float:
    """Full depth against self-speculation: `width` passes of `depth` layers, then one pass of the others for all."""
    layers = shape.layers - depth
    plain = step(shape, batch=batch, context=context).seconds(chip)
    one = layer(shape, batch=batch, context=context) * depth
    drafting = one.seconds(chip) * width + head(shape, batch=batch).seconds(chip) * (width - 1)
    settling = layer(shape, batch=batch, context=context, columns=width) * layers + head(
        shape, batch=batch, columns=width
    )
    waiting = sync * 2 * width if chip.host_predicates else 0.0  # of the drafting loop, and of the exit in each pass
    return expected_tokens(acceptance, width) * plain / (drafting + settling.seconds(chip) + waiting)


def river(shape: Shape, *, batch: int, context: int, bits: int, switch: int, columns: int = 1) -> Work:
    """A step whose layers from `switch` on are twins of fewer bits; their K/V rows are as wide as ever."""
    real = layer(shape, batch=batch, context=context, columns=columns) * switch
    twins = layer(shape, batch=batch, context=context, columns=columns, weight_bytes=TWINS[bits])
    return real + twins * (shape.layers - switch) + head(shape, batch=batch, columns=columns)


def river_speedup(shape: Shape, chip: Chip, *, batch: int, context: int, bits: int, switch: int) -> float:
    """Full depth against the twins from `switch` layers on, unverified."""
    plain = step(shape, batch=batch, context=context).seconds(chip)
    return plain / river(shape, batch=batch, context=context, bits=bits, switch=switch).seconds(chip)


def river_draft_speedup(
    shape: Shape, chip: Chip, *, batch: int, context: int, bits: int, width: int, acceptance: float
) -> float:
    """Full depth against drafts by the twins of all layers, verified by the model."""
    plain = step(shape, batch=batch, context=context).seconds(chip)
    drafting = river(shape, batch=batch, context=context, bits=bits, switch=0).seconds(chip) * (width - 1)
    verifying = step(shape, batch=batch, context=context, columns=width).seconds(chip)
    return expected_tokens(acceptance, width) * plain / (drafting + verifying)


def resident(shape: Shape, *, batch: int, context: int, bits: int | None = None) -> float:
    """Bytes of weights, caches, and twins of so many bits (None: none) that must be in memory together.

    The embedding counts apart from the LM head.
    """
    matrices = shape.layers * shape.layer_weights
    twins = 0.0 if bits is None else matrices * TWINS[bits]
    caches = batch * context * shape.slot_elements * shape.layers
    return (matrices + 2 * shape.head_weights + caches) * BYTES + twins
