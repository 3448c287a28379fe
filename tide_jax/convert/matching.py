"""Which tensor of a checkpoint goes where: the family's table against the files, every discrepancy named at once."""

from collections.abc import Mapping
from typing import NamedTuple

from tide_jax.checkpoint import Tree, flat, part_name
from tide_jax.errors import InputError
from tide_jax.models import DecoderConfig
from tide_jax.models.families import Family, Weight

HEAD = "lm_head.kernel"


class Placed(NamedTuple):
    """A tensor and the parameters it holds.

    Attributes:
        name: of the tensor, as the table writes it.
        weight: its row.
        part: sub-checkpoint of the parameters.
        shapes: of the parameters, in the order of `weight.paths`.
    """

    name: str
    weight: Weight
    part: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.weight.shape(self.shapes)

    @property
    def sizes(self) -> list[int]:
        """Channels of each parameter."""
        return [shape[-1] for shape in self.shapes]


def placements(family: Family, config: DecoderConfig, wanted: Mapping[str, Tree]) -> dict[str, Placed]:
    """Every tensor that a model with this config has, by its name in the table, part after part.

    Args:
        family: whose table is used.
        config: of the model.
        wanted: for each part, the tree of abstract parameters.
    """
    placed = {}
    shapes = {part: {path: tuple(leaf.shape) for path, leaf in flat(tree)} for part, tree in wanted.items()}
    rows = family.rows(config)
    layers = {part_name(layer): layer for layer in range(config.num_layers)}
    for part, of_part in shapes.items():
        left = dict(of_part)
        for weight in rows:
            if weight.part != ("layer" if part in layers else part) or not set(weight.paths) <= set(of_part):
                continue
            name = weight.source.format(layer=layers.get(part))
            placed[name] = Placed(name, weight, part, tuple(left.pop(path) for path in weight.paths))
        if left:
            raise AssertionError(f"the table of {family.name} has no row for {part} {sorted(left)}")
    return placed


def match(
    family: Family, config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Placed]
) -> dict[str, str]:
    """The name that the source gives to each tensor, by its name in the table.

    A head that a tied model ships once more is left out.

    Raises:
        InputError: missing, unexpected and mis-shaped tensors, and those that are there twice, all in one message.
    """
    rows = family.rows(config)
    found: dict[str, str] = {}
    unexpected, misshapen, twice = [], [], []
    for name, shape in shapes.items():
        if family.ignored.fullmatch(name):
            continue
        row = family.locate(name, rows)
        if config.tied_head and row and row[0].paths == (HEAD,):
            continue
        written = family.canonical(name)
        if written not in wanted:
            unexpected.append(name)
        elif written in found:
            twice.append(f"{found[written]} and {name}")
        else:
            found[written] = name
            if shape != wanted[written].shape:
                misshapen.append(f"{name} is {list(shape)}, the config says {list(wanted[written].shape)}")
    missing = [name for name in wanted if name not in found]
    problems = []
    for what, items in (
        ("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen), ("there twice", twice)
    ):  # fmt: skip
        if items:
            more = f" and {len(items) - 5} more" if len(items) > 5 else ""
            problems.append(f"{len(items)} {what}: {'; '.join(items[:5])}{more}")
    if problems:
        raise InputError(
            f"the tensors do not fit a {family.name} model with this config. {'. '.join(problems)}. "
            "Config and weights belong to different models, or the checkpoint is incomplete."
        )
    return found


def head_name(family: Family) -> str:
    """What the table calls the LM head."""
    return next(weight.source for weight in family.weights if weight.paths == (HEAD,))


def embedding_name(family: Family) -> str:
    """What the table calls the token embedding."""
    return next(weight.source for weight in family.weights if weight.paths == ("embedding",))
