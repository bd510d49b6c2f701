"""Fuzzes the frame reader: mutated streams of frames go in, frames or one final refusal come out, and nothing else.

    python tests/support/fuzz_frames.py --runs 1000000 --seed 1        # coverage-guided where atheris is installed
    python tests/support/fuzz_frames.py --runs 1000000 --plain         # mutations alone

Checks after every input: only `BadFrame` was raised; it is raised again by whatever follows; no place was asked for
more than the limit; the reader has not made its own buffer larger than a head may be; every frame handed out was paid
for in bytes. Prints what was refused, how often, and how much the process grew.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec

from evener.wire import reader as reader_module
from evener.wire.errors import BadFrame
from evener.wire.frame import CHECKSUM, CHECKSUM_BYTES, LENGTH_BYTES, PREFIX, PREFIX_BYTES, encode_head, front
from evener.wire.limits import Limits
from evener.wire.reader import FrameReader, Place

LIMITS = Limits(header_bytes=300, buffers=8, frame_bytes=20_000)
SMALLEST_FRAME = PREFIX_BYTES + CHECKSUM_BYTES
LARGEST_HEAD = PREFIX_BYTES + LENGTH_BYTES * LIMITS.buffers + LIMITS.header_bytes + CHECKSUM_BYTES
LARGEST_OWN_BUFFER = 4096 + LARGEST_HEAD
LARGEST_INPUT = 30_000
WARM_UP = 5000
"""Inputs before memory is looked at: caches fill."""
MEMORY = memoryview(bytearray(LIMITS.frame_bytes))


class Hello(msgspec.Struct, tag=True):
    """A header with text and nesting."""

    name: str
    shapes: tuple[tuple[int, ...], ...] = ()


class Push(msgspec.Struct, tag=True):
    """A header with numbers."""

    round: int
    loss: float
    extra: dict[str, int] | None = None


class Wrong(AssertionError):
    """The reader did something that it must never do."""


def check(data: bytes, piece: int, place: Place[Hello | Push]) -> str:
    """Feed `data` in pieces to a new reader and check every promise; the refusal, if there was one."""
    reader: FrameReader[Hello | Push] = FrameReader(Hello | Push, LIMITS, place)
    num_frames = done = count = 0
    try:
        while True:
            arrived = reader.feed(count)
            while arrived is not None:
                num_frames += 1
                arrived = reader.feed(0)
            if done == len(data):
                break
            space = reader.space
            count = min(len(space), piece, len(data) - done)
            if count == 0 or len(space) > max(LARGEST_OWN_BUFFER, LIMITS.frame_bytes):
                raise Wrong(f"asked for {len(space)} bytes")
            space[:count] = data[done : done + count]
            done += count
    except BadFrame as refusal:
        _require_final(reader, refusal)
        return re.sub(r"\d+", "N", str(refusal).split(", got")[0].split(": ")[0])
    if num_frames * SMALLEST_FRAME > len(data):
        raise Wrong(f"{num_frames} frames out of {len(data)} bytes")
    return "not refused, more is due" if reader.midway else "not refused, whole frames"


def _require_final(reader: FrameReader[Hello | Push], refusal: BadFrame) -> None:
    try:
        reader.feed(0)
    except BadFrame as again:
        if str(again) == str(refusal):
            return
    raise Wrong("a refusal was not final")


def place_or_drop(header: Hello | Push, lengths: tuple[int, ...]) -> list[memoryview] | None:
    """Memory within the limit for some frames, none for others."""
    if sum(lengths) > LIMITS.frame_bytes or len(lengths) > LIMITS.buffers:
        raise Wrong(f"was asked for {lengths} bytes")
    if isinstance(header, Hello) and len(header.name) % 2:
        return None
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [MEMORY[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def run(data: bytes) -> str:
    """One input of the fuzzer: a byte that says how it is cut up, then the stream."""
    piece = (data[0] % 64 + 1) ** 2 if data else 1
    return check(data[1:], piece, place_or_drop)


def valid_stream(random: Random) -> bytearray:
    """How a byte and one to four frames begin their lives as an input."""
    stream = bytearray([random.randrange(256)])
    for sequence in range(random.randint(1, 4)):
        stream += _frame(random, sequence)
    return stream


def _frame(random: Random, sequence: int) -> bytes:
    header: Hello | Push | str
    if random.random() < 0.5:
        header = Hello("x" * random.randrange(20), ((random.randrange(100),),) * random.randrange(3))
    else:
        header = Push(random.getrandbits(40), random.random(), random.choice([None, {"a": 1}]))
    lengths = [random.choice([0, 1, 7, 300, 5000]) for _ in range(random.randrange(4))]
    flags = 0
    if random.random() < 0.05:
        header, lengths, flags = "tired", [], 1
    return encode_head(sequence, msgspec.msgpack.encode(header), lengths, flags) + random.randbytes(sum(lengths))


def mutate(stream: bytearray, random: Random) -> bytearray:
    """One to four changes of a stream; afterwards its heads often have right checksums again."""
    for _ in range(random.randint(1, 4)):
        random.choice(CHANGES)(stream, random)
    if random.random() < 0.6:
        repair(stream)
    return stream


def flip(stream: bytearray, random: Random) -> None:
    """Change bits of one byte, mostly near the front."""
    if stream:
        stream[min(int(random.expovariate(0.02)), len(stream) - 1)] ^= 1 << random.randrange(8)


def overwrite(stream: bytearray, random: Random) -> None:
    """Put an interesting number somewhere."""
    where = random.randrange(len(stream) + 1)
    value = random.choice([0, 1, 2**8 - 1, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
    width = random.choice([1, 2, 4, 8])
    stream[where : where + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")


def cut(stream: bytearray, random: Random) -> None:
    """Leave out a piece."""
    begin = random.randrange(len(stream) + 1)
    del stream[begin : begin + random.choice([1, 8, 100, 10**6])]


def repeat(stream: bytearray, random: Random) -> None:
    """Say a piece twice."""
    begin = random.randrange(len(stream) + 1)
    piece = stream[begin : begin + random.choice([1, 8, 60, 1000])]
    stream[begin:begin] = piece


def insert(stream: bytearray, random: Random) -> None:
    """Put random bytes in between."""
    where = random.randrange(len(stream) + 1)
    stream[where:where] = random.randbytes(random.choice([1, 4, 40]))


CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (flip, flip, overwrite, cut, repeat, insert)


def repair(stream: bytearray) -> None:
    """Give every head a right checksum, so that what lies behind that check is tried too."""
    begin = 1
    while begin + PREFIX_BYTES <= len(stream):
        _, _, _, num_buffers, header_bytes, _ = PREFIX.unpack_from(stream, begin)
        end = begin + PREFIX_BYTES + LENGTH_BYTES * num_buffers + header_bytes
        if end + CHECKSUM_BYTES > len(stream):
            return
        CHECKSUM.pack_into(stream, end, zlib.crc32(stream[begin:end]))
        begin = end + CHECKSUM_BYTES + sum(front(num_buffers).unpack_from(stream, begin)[6:])


def mutate_alone(runs: int, seed: int) -> Counter[str]:
    """Check `runs` mutated streams; how often each refusal came."""
    random, outcomes = Random(seed), Counter[str]()
    for _ in range(runs):
        outcomes[run(bytes(mutate(valid_stream(random), random)))] += 1
    return outcomes


def mutate_by_coverage(runs: int, seed: int, report: Callable[[Counter[str]], None]) -> None:
    """The same, led by the code that inputs reach; libFuzzer ends the process after `report`."""
    import atheris  # type: ignore[import-untyped, unused-ignore]

    outcomes = Counter[str]()

    def one_input(data: bytes) -> None:
        outcomes[run(data)] += 1
        if outcomes.total() == runs:
            report(outcomes)

    def custom_mutator(data: bytes, max_size: int, number: int) -> bytes:
        random = Random(number)
        if random.random() < 0.05 or len(data) < SMALLEST_FRAME:
            return bytes(valid_stream(random))[:max_size]
        if random.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        return bytes(mutate(bytearray(data), random))[:max_size]

    for part in (FrameReader, reader_module):
        for function in filter(inspect.isfunction, vars(part).values()):
            atheris.instrument_func(function)
    settings = [f"-runs={runs}", f"-seed={seed}", f"-max_len={LARGEST_INPUT}", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *settings], one_input, custom_mutator=custom_mutator)
    atheris.Fuzz()


def largest_kilobytes() -> int:
    """The most memory that this process has had."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Fuzz and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="mutations alone, also where atheris is installed")
    given = parser.parse_args()
    mutate_alone(min(WARM_UP, given.runs), given.seed + 1)
    before, began = largest_kilobytes(), time.perf_counter()

    def report(outcomes: Counter[str]) -> None:
        for outcome, count in outcomes.most_common():
            sys.stdout.write(f"{count:9d}  {outcome}\n")
        seconds, grown = time.perf_counter() - began, largest_kilobytes() - before
        sys.stdout.write(f"{outcomes.total()} inputs in {seconds:.0f} s, memory grew by {grown} kB\n")
        sys.stdout.flush()

    if given.plain or importlib.util.find_spec("atheris") is None:
        report(mutate_alone(given.runs, given.seed))
    else:
        mutate_by_coverage(given.runs, given.seed, report)


if __name__ == "__main__":
    main()
