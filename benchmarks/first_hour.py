"""What a new user types in the first hour, mistakes first: does every line end as it should, and in a sentence?

    python benchmarks/first_hour.py [--only WORD] [--part 2/5] [--json]

Every line is typed in a folder of its own with some small files in it, good ones and bad ones. It is good if it ends
with the exit code that the documentation promises, without a traceback; a mistake says so in one sentence of less than
300 characters, a typo before PyTorch is loaded (told is the processor time, which other work does not change).
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from first_hour_files import FILES
from results import Results, open_results, parser_of

_TYPO_SECONDS = 0.5
_LONGEST = 300


class Line(NamedTuple):
    """What is typed.

    Attributes:
        words: behind `evener`; with a shell's quotes and signs.
        code: with which it is to end.
        says: what is to be in what it says.
        is_quick: whether it needs no PyTorch, and is to be told at once.
    """

    words: str
    code: int = 2
    says: str = ""
    is_quick: bool = False


def main() -> None:
    """Every line, its verdict, and how many are good."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="lines that hold this")
    parser.add_argument("--part", default="1/1", help="such as 2/5: the second fifth of them")
    words = parser.parse_args()
    part, parts = map(int, words.part.split("/"))
    lines = [line for line in LINES if words.only in line.words]
    lines = lines[len(lines) * (part - 1) // parts : len(lines) * part // parts]
    with open_results(words) as results:
        good = [typed(line, results) for line in lines]
        results.add("{good} of {lines} lines end as they should", good=sum(good), lines=len(lines))


def typed(line: Line, results: Results) -> bool:
    """Whether the line is good, which is told."""
    with tempfile.TemporaryDirectory() as folder:
        code, said, seconds, processor = _typed_in(Path(folder), line)
    fault = _fault_of(line, code, said, processor)
    results.add(
        "{verdict:5} {line:78} {code:4} {seconds:5.1f} s {processor:5.2f} s of a processor   {what}",
        verdict="bad" if fault else "good",
        line=line.words,
        code=code,
        seconds=seconds,
        processor=processor,
        what=fault or _last_sentence(said),
    )
    return not fault


def _typed_in(folder: Path, line: Line) -> tuple[int, str, float, float]:
    for name, text in FILES.items():
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    (folder / "empty").mkdir()
    shown = {**os.environ, "COLUMNS": "80", "PYTHONWARNINGS": "ignore", "EVENER_HOME": str(folder / "home")}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    evener = f"{sys.executable} -m evener"
    command = f"{evener} {line.words.replace('{evener}', evener)}"
    try:
        done = subprocess.run(command, shell=True, cwd=folder, env=shown, capture_output=True, text=True, timeout=300)
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, said = -1, "still running after five minutes"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(folder / "home", ignore_errors=True)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return code, said, time.monotonic() - begin, processor


def _fault_of(line: Line, code: int, said: str, processor: float) -> str:
    """What is not as it should be; empty if all is."""
    sentence = _last_sentence(said)
    if "Traceback" in said:
        return f"traceback: {sentence}"
    if code != line.code:
        return f"exit code {line.code} wanted: {sentence}"
    if line.says not in " ".join(said.replace("│", " ").split()):
        return f"does not say {line.says!r}: {sentence}"
    if code == 2 and not 10 < len(sentence) < _LONGEST:
        return f"{len(sentence)} characters are no sentence: {sentence}"
    if line.is_quick and processor > _TYPO_SECONDS:
        return f"a typo is told after {processor:.2f} s of a processor: {sentence}"
    return ""


def _last_sentence(said: str) -> str:
    """What follows the last `evener:`, or what stands in a box of the command line, or the last line."""
    text = " ".join(said.replace("│", " ").split())
    if "evener: " in text:
        return text.rsplit("evener: ", 1)[1]
    lines = [line.strip(" │─╭╮╰╯") for line in said.splitlines()]
    return next((line for line in reversed(lines) if line), "")


LINES = (
    # Commands and options that do not exist, in every form.
    Line("", 0, "Trains one PyTorch model on uneven machines", is_quick=True),
    Line("--version", 0, "0.", is_quick=True),
    Line("--help", 0, "Commands", is_quick=True),
    Line("trian digits", says="train", is_quick=True),
    Line("train", says="Missing argument", is_quick=True),
    Line("train --help", 0, "--local-nodes", is_quick=True),
    Line("plan --help", 0, "--machines", is_quick=True),
    Line("train digit", says="digits", is_quick=True),
    Line("train DIGITS", says="digits", is_quick=True),
    Line("train digits --local-node 1,1", says="--local-nodes", is_quick=True),
    Line("train digits --strategy pipline", says="pipeline", is_quick=True),
    Line("train digits --strategy magic", says="auto", is_quick=True),
    Line("train digits --agreement averag", says="average", is_quick=True),
    Line("train digits --agreement sync --strategy filter", says="--strategy", is_quick=True),
    Line("train digits --epochs -1", says="positive", is_quick=True),
    Line("train digits --epochs 0", says="positive", is_quick=True),
    Line("train digits --epochs ten", says="ten", is_quick=True),
    Line("train digits --batch-size 0", says="positive", is_quick=True),
    Line("train digits --batch-size 1.5", says="1.5", is_quick=True),
    Line("train digits --precision fp12", says="fp16", is_quick=True),
    Line("train digits --precision half", says="fp16", is_quick=True),
    Line("train digits --seed x", says="x", is_quick=True),
    Line("train digits --local-nodes 1,fast", says="fast", is_quick=True),
    Line("train digits --local-nodes 1,-0.5", says="-0.5", is_quick=True),
    Line("train digits --local-nodes ''", says="--local-nodes", is_quick=True),
    Line("train digits --local-nodes 2", says="at most 1", is_quick=True),
    Line("train digits --shares 1,2 --local-nodes 1,1,1", says="3 numbers", is_quick=True),
    Line("train digits --shares most --local-nodes 1,1", says="most", is_quick=True),
    Line("train digits --micro-batches 3 --strategy data", says="--micro-batches", is_quick=True),
    Line("train digits --memory lots", says="lots", is_quick=True),
    Line("train digits --patience 0", says="positive", is_quick=True),
    Line("train digits --patience soon", says="soon", is_quick=True),
    Line("train digits --option lr", says="key=value", is_quick=True),
    Line("train digits --option colour=1", says="colour"),
    Line("train digits --devices cuda:99", says="cpu"),
    Line("train digits --devices gpu", says="cpu"),
    Line("train digits --checkpoint-every soon", says="soon", is_quick=True),
    Line("train digits --plan none.json", says="none.json"),
    Line("train digits --columns 2", says="spatial", is_quick=True),
    Line("train digits --strategy spatial --columns 0", says="positive", is_quick=True),
    Line("train digits --strategy spatial --columns 2 --local-nodes 1,1,1", says="3 nodes"),
    Line("train digits --members 3", says="pipeline+", is_quick=True),
    Line("train digits --strategy pipeline+filtr", says="pipeline+filter", is_quick=True),
    Line("train digits --strategy pipeline+filter --elastic", says="--elastic", is_quick=True),
    Line("train digits --strategy pipeline+filter --local-nodes 1,1,1", says="3 nodes"),
    Line("train synthetic --option image=16x16", says="1x16x16x16 for volumes"),
    Line("train digits --system machines.json", says="--agreement", is_quick=True),
    Line("train digits --agreement average --system none.json --local-nodes 1,1", says="--local-nodes", is_quick=True),
    Line("train digits --agreement federated --fraction 2", says="at most 1", is_quick=True),
    Line("train digits --fraction 0.5", says="federated", is_quick=True),
    Line("train digits --resume", says="no checkpoint"),
    Line("train digits --compression int8", says="--", is_quick=True),
    Line("run", says="Missing argument", is_quick=True),
    Line("run none.py", says="none.py", is_quick=True),
    Line("run plain.py", 0, says="tensor([1.])"),
    Line("run plain.py --local-nodes 1,1", says="evener.join"),
    Line("run broken.py", 3, says="broken.py line 1", is_quick=True),
    # Tasks that are none.
    Line("train none.py", says="none.py", is_quick=True),
    Line("train empty", says="empty", is_quick=True),
    Line("train empty.py", says="task"),
    Line("train words.txt", says="words.txt", is_quick=True),
    Line("train broken.py", 3, says="broken.py"),
    Line("train raises.py", 3, says="raises.py"),
    Line("train imports.py", 3, says="nosuchmodule"),
    Line("train module.py", says="function"),
    Line("train number.py", says="Task"),
    Line("train no_scalar.py --local-nodes 1,1", says="not one number"),
    Line("train no_pairs.py --local-nodes 1,1", says="pairs"),
    Line("train stream.py --local-nodes 1,1", says="len"),
    Line("train no_data.py --local-nodes 1,1", 3, says="no_data.py"),
    Line("train nan.py --local-nodes 1,1", 3, says="loss"),
    Line("train unused.py --local-nodes 1,1 --epochs 1", 0),
    Line("train small.py --batch-size 9999", says="at most"),
    Line("train small.py --batch-size 1 --local-nodes 1,1", says="at least the 2 nodes"),
    Line("train shuffled.py --local-nodes 1,1", says="are not those of node-0"),
    Line("train small.py --memory 9KB --batch-size 40", 5, says="fit"),
    # What works.
    Line("train small.py --epochs 1", 0, says="loss"),
    Line("train small.py --epochs 1 --local-nodes 1.0,0.5", 0, says="loss"),
    Line("train small.py --epochs 1 --local-nodes 1,1 --strategy pipeline", 0),
    Line("train small.py --epochs 1 --local-nodes 1,1 --strategy sharded", 0),
    Line("train small.py --epochs 1 --local-nodes 1,1,1,1 --strategy pipeline+filter", 0),
    Line("train small.py --epochs 1 --local-nodes 1,1 --agreement average", 0),
    Line("train small.py --epochs 2 --local-nodes 1,1 --agreement federated --fraction 0.5", 0),
    Line("train small.py --epochs 1 --output out && test -f out/record.json", 0),
    Line("train small.py --epochs 1 --output out && {evener} train small.py --epochs 1 --output out", says="--resume"),
    Line("train small.py --epochs 1 --output out && {evener} report out --output page.html && test -s page.html", 0),
    Line("train small.py --epochs 1 --option width=16", 0),
    Line("train small.py --epochs 1 --option wdith=16", says="width"),
    Line("train small.py --epochs 1 --option width=wide", says="wide"),
    Line("train small.py --epochs 1 --seed 3 --precision fp64", 0),
    # Places where nothing can be read or written.
    Line("train small.py --output /proc/out", says="/proc/out"),
    Line("train small.py --output words.txt", says="words.txt"),
    Line("train small.py --checkpoint /proc/kept", says="/proc/kept"),
    Line("benchmark --output /proc/none/cluster.json", says="/proc/none"),
    Line("plan vgg16 --machines 2xv100-node --save /proc/none/plan.json", says="/proc/none"),
    Line("trace digits --output /proc/none/graph.json", says="/proc/none"),
    Line("report record.json --output /proc/none/page.html", says="/proc/none"),
    Line("up --home /proc/home", says="/proc/home"),
    # Files that hold something else.
    Line("report none.json", says="none.json", is_quick=True),
    Line("report empty", says="empty"),
    Line("report words.txt", says="words.txt"),
    Line("report damaged.json", says="damaged.json"),
    Line("report deep.json", says="deep.json"),
    Line("report list.json", says="list.json"),
    Line("train small.py --plan damaged.json", says="damaged.json"),
    Line("train small.py --plan list.json", says="list.json"),
    Line("train small.py --plan latin.json", says="latin.json"),
    # Plans for machines.
    Line("plan", says="Missing argument", is_quick=True),
    Line("plan resnet51 --machines 2xv100-node", says="resnet50"),
    Line("catalogue", 0, "rtx3090", is_quick=True),
    Line("plan resnet50 --machines 2xv101", says="v100"),
    Line("plan resnet50 --machines two", says="evener catalogue"),
    Line("plan resnet50 --machines 0xv100-node", says="0"),
    Line("plan resnet50 --profile none.json", says="none.json"),
    Line("plan resnet50 --profile damaged.json", says="damaged.json"),
    Line("plan resnet50", says="benchmark"),
    Line("plan vgg16 --machines 2xv100-node", 0, says="data"),
    Line("plan vgg16 --machines 2xv100-node --batch-size 0", says="positive"),
    Line("plan vgg16 --machines 2xv100-node --batch-size 1", 0),
    Line("plan vgg16 --machines 2xv100-node --scale 1..64", 0),
    Line("plan vgg16 --machines 2xv100-node --scale 8..1", says="--scale"),
    Line("plan vgg16 --machines 2xv100-node --scale many", says="many"),
    Line("plan vgg", says="vgg16"),
    Line("plan cosmoflow --machines 2xv100-node --strategy spatial", 0, says="Use spatial"),
    Line("plan vgg16 --machines 2xv100-node --strategy pipeline+hybrid", 0, says="Use pipeline+hybrid"),
    Line("trace small.py", 0, says="Linear"),
    Line("trace vgg17", says="vgg1"),
    # Masters and nodes.
    Line("join", says="Missing argument", is_quick=True),
    Line("join nowhere.invalid:1 --token none", says="begins with evener1-"),
    Line("join 127.0.0.1:1", says="token"),
    Line("join 127.0.0.1:1 --token-file none.txt", says="none.txt"),
    Line("join 127.0.0.1:port --token none", says="HOST:PORT"),
    Line("join 127.0.0.1:99999 --token none", says="HOST:PORT"),
    Line("nodes --master 127.0.0.1:1", says="belong together"),
    Line("nodes", says="up"),
    Line("down", says="up"),
    Line("down --master 127.0.0.1:1", says="belong together"),
    Line("stop", says="up"),
    Line("stop --master 127.0.0.1:1", says="belong together"),
    Line("up --system none.json", says="none.json"),
    Line("up --system words.txt", says="words.txt"),
    Line("up --listen :99999", says="99999"),
    Line("up --listen here", says="here"),
    # Experiments.
    Line("experiment", 0, says="gpipe", is_quick=True),
    Line("experiment nfn", says="nfnn", is_quick=True),
    Line("experiment nfnn --workers 0", says="positive"),
    Line("experiment nfnn --workers 1 --updates 20 --mode sync --repeat 1", says="fetch"),
    Line("version", 0, says="torch"),
)


if __name__ == "__main__":
    main()
