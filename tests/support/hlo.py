"""Read the optimized HLO that `compiled.as_text()` prints, to see what a compiled program really does and holds.

Does a decode step touch whole key/value caches, or only the rows it adds? XLA answers in the text: after its
copy insertion, every buffer that could not be reused shows as an op of its own. Searching for the word "copy"
misses half of it (a transposing fusion moves as much) and finds too much (a copy of four bytes is harmless).
So what counts is every op inside a loop whose output is as large as a cache.
"""

import collections
import dataclasses
import math
import re

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(\[{}\])]|,')
_TYPED = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\]")
_COMMENT = re.compile(r"/\*\w+=\d+\*/")
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.*)$")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}")
_CALLS = (
    "calls to_apply body condition branch_computations true_computation false_computation called_computations"
).split()
# These hand on a buffer, or wait for one, without touching what is in it. What `while`, `call` and
# `async-start` run is searched by itself.
_MOVES_NOTHING = set(
    "parameter constant tuple get-tuple-element bitcast opt-barrier add-dependency while call async-start "
    "async-update async-done copy-done".split()
)
_HALF = {"bf16", "f16"}
_REARRANGES = {"bitcast", "copy", "transpose", "reshape"}
# A program that does any of these waits for its host, or hands it something.
_HOST_OPCODES = set("infeed outfeed send send-done recv recv-done".split())
_HOST_MEMORY = re.compile(r"[:)]S\(5\)")
_REDISTRIBUTES = set("all-gather all-to-all ragged-all-to-all collective-permute collective-broadcast".split())
# XLA gives their result the buffer of operand 0, and puts a copy (which is then found) where it cannot.
_IN_PLACE = {"dynamic-update-slice", "scatter"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `args` is the text between the parentheses, split, without shapes or `%`."""

    name: str
    shape: str
    opcode: str
    args: tuple[str, ...]
    attributes: dict[str, str]

    @property
    def elements(self) -> tuple[int, ...]:
        """The element count of each array in the result, in order (one for an array, many for a tuple)."""
        return tuple(count for _, count in self.arrays)

    @property
    def arrays(self) -> tuple[tuple[str, int], ...]:
        """Dtype and element count of each array in the result, in order."""
        return tuple(
            (dtype, math.prod(map(int, re.findall(r"\d+", dims)))) for dtype, dims in _TYPED.findall(self.shape)
        )

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations this instruction runs, in the order of their attributes."""
        values = (self.attributes[key] for key in _CALLS if key in self.attributes)
        return tuple(name for value in values for name in re.findall(r"[^\s,{}%]+", value))

    @property
    def aliased_outputs(self) -> frozenset[str]:
        """Outputs ("" for the whole, "1" for the second of a tuple) that are written into an operand."""
        aliases = self.attributes.get("output_to_operand_aliasing", "")
        return frozenset(output for output, _ in _ALIAS.findall(aliases))


@dataclasses.dataclass(frozen=True)
class Computation:
    """The instructions of one computation by name, in their order, and the name of its root."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    def past_bitcasts(self, name: str) -> Instruction:
        """The instruction `name`, or what it is a bitcast of."""
        instruction = self.instructions[name]
        while instruction.opcode == "bitcast":
            instruction = self.instructions[instruction.args[0]]
        return instruction

    def readers(self, name: str) -> list[Instruction]:
        """Every instruction that reads `name`, directly or through bitcasts."""
        found = []
        for user in self.instructions.values():
            if name in user.args:
                found += self.readers(user.name) if user.opcode == "bitcast" else [user]
        return found


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed module: its header line, its computations by name, and the name of the one that is the program."""

    header: str
    computations: dict[str, Computation]
    entry: str

    def parameters(self) -> list[Instruction]:
        """What the program is given: its flattened arguments, unused ones dropped; `args` is the number of each."""
        body = self.computations[self.entry].instructions.values()
        return sorted((i for i in body if i.opcode == "parameter"), key=lambda i: int(i.args[0]))

    def instructions(self) -> list[Instruction]:
        """Every instruction of every computation, those inside fusions included."""
        return [i for computation in self.computations.values() for i in computation.instructions.values()]

    def in_loops(self) -> list[tuple[Computation, Instruction]]:
        """Every instruction that a `while` repeats, however deep in branches, calls and inner loops.

        A fusion is one op: what is inside it has no buffer of its own, so its body is not entered.
        """
        return self._reached([name for i in self.instructions() if i.opcode == "while" for name in i.called])

    def executed(self) -> list[tuple[Computation, Instruction]]:
        """Every instruction that has buffers of its own: all but what is inside fusions."""
        return self._reached([self.entry])

    def _reached(self, todo: list[str]) -> list[tuple[Computation, Instruction]]:
        seen = set()
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                body = self.computations[name].instructions.values()
                todo += [called for i in body if i.opcode != "fusion" for called in i.called]
        found = [computation for name, computation in self.computations.items() if name in seen]
        return [(computation, i) for computation in found for i in computation.instructions.values()]


@dataclasses.dataclass(frozen=True)
class Finding:
    """An op that should not be there, such as one inside a loop that makes or moves a whole cache."""

    computation: str
    instruction: str
    shape: str
    opcode: str
    reason: str

    def __str__(self) -> str:
        return f"{self.computation} / {self.instruction}: {self.shape} {self.opcode} ({self.reason})"


def _split(text: str) -> list[str]:
    """`text` cut at the commas that stand outside every bracket and string."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
        elif token[0] == "," and depth == 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _group(text: str) -> tuple[str, str]:
    """What is inside the bracket that `text` starts with, and what follows the bracket."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0:
            return text[1 : token.start()], text[token.end() :]
    raise ValueError(f"unbalanced brackets: {text[:120]}")


def _instruction(name: str, text: str) -> Instruction:
    """The instruction `name`, whose definition reads: shape opcode(arguments), attributes."""
    if text.startswith("("):
        inside, rest = _group(text)
        shape = f"({inside})"
    else:
        shape, _, rest = text.partition(" ")
    opcode, bracket, rest = rest.strip().partition("(")
    inside, rest = _group(bracket + rest)
    args = tuple(arg.split()[-1].lstrip("%") for arg in _split(inside))
    attributes = dict(part.partition("=")[::2] for part in _split(rest))
    return Instruction(name, shape, opcode, args, attributes)


def parse(text: str) -> Module:
    """The module that `text`, one `compiled.as_text()`, describes."""
    computations: dict[str, Computation] = {}
    name, entry, root, instructions = None, "", "", {}
    lines = _COMMENT.sub("", text).splitlines()
    for line in lines:
        if name is None:
            if header := _HEADER.match(line):
                name, root, instructions = header[2], "", {}
                entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, instructions, root or list(instructions)[-1])
            name = None
        elif match := _INSTRUCTION.match(line):
            instructions[match[2]] = _instruction(match[2], match[3])
            root = match[2] if match[1] else root
    if not computations:
        raise ValueError("no computation in this text: is it the as_text() of a compiled function?")
    return Module(next(line for line in lines if line.strip()), computations, entry)


def _rewrites(fused: Computation, output: str) -> str | None:
    """None when the fusion writes `output` over one of its parameters in place, else what it does instead.

    In place means what buffer assignment and emitters both ask for: an update straight on a parameter, whose
    old contents nothing else in the fusion reads (but for slices, such as the old row).
    """
    update = fused.past_bitcasts(output)
    if update.opcode not in _IN_PLACE:
        return f"fusion ends in {update.opcode}"
    target = fused.past_bitcasts(update.args[0])
    if target.opcode != "parameter":
        return f"fusion updates the result of {target.opcode}, not one of its parameters"
    others = [r for r in fused.readers(target.name) if r.name != update.name and r.opcode != "dynamic-slice"]
    # A buffer that is also an index or an update of its own update is read whole while it is overwritten.
    if others or sum(fused.past_bitcasts(a).name == target.name for a in update.args) > 1:
        return f"fusion updates {target.name} in place and reads it elsewhere"
    return None


def _judge(module: Module, instruction: Instruction, min_elements: int) -> str | None:
    """Why this instruction makes or moves something of `min_elements`, or None."""
    large = [index for index, count in enumerate(instruction.elements) if count >= min_elements]
    if not large or instruction.opcode in _MOVES_NOTHING or instruction.opcode in _IN_PLACE:
        return None
    is_tuple = instruction.shape.startswith("(")
    if all((str(index) if is_tuple else "") in instruction.aliased_outputs for index in large):
        return None
    if instruction.opcode == "conditional":
        return "a conditional returns a cache"
    if instruction.opcode == "fusion":
        fused = module.computations[instruction.called[0]]
        root = fused.instructions[fused.root]
        outputs = [root.args[index] for index in large] if root.opcode == "tuple" else [root.name]
        return "; ".join(filter(None, (_rewrites(fused, output) for output in outputs))) or None
    return "writes a whole cache"


def cache_sized_ops(text: str, min_elements: int) -> list[Finding]:
    """The ops inside loops with an output of at least `min_elements` that are not an update in place.

    `min_elements` is that of one cache. Sizes in a test must set it apart: weights, logits and activations as
    large as a cache would be found too.
    """
    module = parse(text)
    return [
        Finding(computation.name, i.name, i.shape, i.opcode, reason)
        for computation, i in module.in_loops()
        if (reason := _judge(module, i, min_elements))
    ]


def conditionals_in_loops(text: str) -> list[Instruction]:
    """The conditionals that a loop runs: a cond that XLA turned into a select is not among them."""
    return [i for _, i in parse(text).in_loops() if i.opcode == "conditional"]


def count(text: str, opcode: str) -> int:
    """How many instructions of this opcode the module has, inside fusions too."""
    return sum(i.opcode == opcode for i in parse(text).instructions())


def custom_call_targets(text: str) -> collections.Counter[str]:
    """How often each custom call target (FFI kernel, library routine) appears."""
    calls = (i for i in parse(text).instructions() if i.opcode == "custom-call")
    return collections.Counter(i.attributes["custom_call_target"].strip('"') for i in calls)


def donated(text: str) -> set[int]:
    """Numbers of the parameters that an output is written into (flattened arguments, unused ones dropped)."""
    attributes = dict(part.partition("=")[::2] for part in _split(parse(text).header))
    return {int(parameter) for _, parameter in _ALIAS.findall(attributes.get("input_output_alias", ""))}


def undonated(text: str, min_elements: int) -> list[Instruction]:
    """The program's parameters of at least `min_elements` that no output is written into."""
    kept = donated(text)
    return [
        i for i in parse(text).parameters() if max(i.elements, default=0) >= min_elements and int(i.args[0]) not in kept
    ]


def widened(text: str, min_elements: int) -> list[Finding]:
    """The ops that make a float32 copy of a 16-bit parameter of at least `min_elements`: such weights are held twice.

    A conversion inside a fusion that goes on to use it, as a matrix product does, holds nothing.
    """
    module = parse(text)
    halves = {n for i in module.parameters() for dtype, n in i.arrays if dtype in _HALF and n >= min_elements}

    def converts(computation: Computation, name: str) -> bool:
        """Whether an op, or what it is a rearrangement of, makes float32 of such a parameter."""
        i = computation.instructions[name]
        while i.opcode in _REARRANGES:
            i = computation.instructions[i.args[0]]
        of = computation.instructions[i.args[0]] if i.opcode == "convert" else None
        return of is not None and of.arrays[0][0] in _HALF and i.arrays[0][0] == "f32" and i.elements[0] in halves

    found = []
    for computation, i in module.executed():
        inside, outputs = computation, [i.name]
        if i.opcode == "fusion":
            inside = module.computations[i.called[0]]
            root = inside.instructions[inside.root]
            outputs = root.args if root.opcode == "tuple" else [root.name]
        if any(converts(inside, output) for output in outputs):
            found.append(Finding(computation.name, i.name, i.shape, i.opcode, "holds 16-bit weights as float32"))
    return found


def host_ops_in_loops(text: str) -> list[Finding]:
    """The ops inside loops that call the host, send it something, or put something into its memory."""

    def reason(i: Instruction) -> str | None:
        target = i.attributes.get("custom_call_target", "")
        if i.opcode in _HOST_OPCODES:
            return "transfer to or from the host"
        if "callback" in target or "Host" in target:
            return f"calls {target}"
        return "in the memory of the host" if _HOST_MEMORY.search(i.shape) else None

    return [Finding(c.name, i.name, i.shape, i.opcode, why) for c, i in parse(text).in_loops() if (why := reason(i))]


def redistributed(text: str, min_elements: int) -> list[Finding]:
    """The ops that bring at least `min_elements` together from several devices, or pass them on: gathered arrays.

    Sums over devices (all-reduce) are not among them: they are what sharing the work costs.
    """
    return [
        Finding(computation.name, i.name, i.shape, i.opcode, "brought together from several devices")
        for computation, i in parse(text).executed()
        if i.opcode.removesuffix("-start") in _REDISTRIBUTES and max(i.elements, default=0) >= min_elements
    ]


def temporaries_bound(
    *, batch: int, columns: int, vocab: int, ffn: int, heads: int, slots: int, itemsize: int
) -> float:
    """Bytes of temporaries that a program of these sizes may have: logits, and three of the widest activation.

    B·V·4 + 3·B·T·max(2·ffn, heads·S)·itemsize, and a fifth more for everything small.
    """
    return 1.2 * (batch * vocab * 4 + 3 * batch * columns * max(2 * ffn, heads * slots) * itemsize)
