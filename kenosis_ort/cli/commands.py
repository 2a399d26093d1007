"""The commands as data: what each says of itself, its arguments, and the function that performs it.

Nothing slow is imported here; a command's module is, when it runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from kenosis_ort.cli import flags
from kenosis_ort.cli.parser import Parser

WORST_LAYERS: Final = 8
"""Layers that ``compare`` shows without ``--full``."""
SHELLS: Final = ("bash", "zsh", "tcsh")


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        summary: One line for the list of commands.
        usage: Its arguments, shortened.
        about: What it does, with examples.
        arguments: Its arguments, those that all commands take aside.
        function: ``module:function`` of this package that performs it: takes the parsed arguments and the screen,
            returns the exit code.
        one: What its exit code 1 says; empty where it has none.
        first: Options that ``--help`` shows where others are left to ``--help-all``; empty for all.
    """

    summary: str
    usage: str
    about: str
    arguments: Sequence[flags.Argument]
    function: str
    one: str = ""
    first: tuple[str, ...] = ()

    def fill(self, parser: Parser) -> None:
        """Adds the arguments to a parser."""
        flags.add_arguments(parser, self.arguments)
        if self.first:
            parser.show_first(*self.first)

    @property
    def run(self) -> Callable[..., int]:
        """The function that performs it, imported."""
        module, _, name = self.function.partition(":")
        found: Callable[..., int] = getattr(import_module(f"kenosis_ort.cli.{module}"), name)
        return found


_OUT: Final = flags.path("out", "OUT", "the file to write")
_HOW_TO_TIME: Final = "how to time"
_THREADS: Final = flags.argument("--threads", type=flags.threads, default=1, help="of a session; 0: all (default: 1)")
COMMANDS: Final[dict[str, Command]] = {
    "quantize": Command(
        "quantize a float model to INT8",
        "MODEL [OUT] (--data SOURCE | --synthetic [N]) [options]",
        r"""Quantizes MODEL to the file OUT (MODEL.int8.onnx unless it is named), from data
of yours (--data) or from made-up data (--synthetic). Whatever is not given is
chosen for this machine's runtime. OUT.recipe.toml, saved beside it, makes the
same model again from the same data.

  kenosis-ort quantize model.onnx --data samples.npz
  kenosis-ort quantize model.onnx --data photos/ --mean 0.485,0.456,0.406 \
                       --std 0.229,0.224,0.225 --report report.html
  kenosis-ort quantize model.onnx out.onnx --data loader:samples --recipe accurate
  kenosis-ort quantize model.onnx --synthetic
  kenosis-ort quantize model.onnx --dry-run
  kenosis-ort quantize model.onnx again.onnx --data samples.npz \
                       --recipe model.int8.recipe.toml
""",
        (
            flags.path("model", "MODEL", "the float model"),
            flags.path("out", "OUT", "the file to write (default: MODEL with the suffix .int8.onnx)", nargs="?"),
            *flags.data_arguments("calibration data"),
            *flags.OPTIONS,
            *flags.MACHINES,
        ),
        "quantize_command:quantize",
        one="done, but the fusion proof shows float kernels where integer ones were planned; with --strict also where "
        "the file holds a float model",
        first=(
            *("--data", "--synthetic", "--recipe", "--accuracy-budget", "--target", "--exclude", "--report"),
            *("--dry-run", "--eval-data", "--metric", "--json", "-q", "-v"),
        ),
    ),
    "verify": Command(
        "show which kernel of the runtime executes each node of a model",
        "MODEL [options]",
        """Loads a quantized model of any origin in ONNX Runtime with all optimizations,
reads the optimized graph back and shows which nodes run on integer kernels,
which run in float, and why.

  kenosis-ort verify model.int8.onnx
  kenosis-ort verify model.int8.onnx --strict -q && echo all integer

Tells whether the file computes the same integers on every x86-64 processor:
without VNNI, kernels add two products of 8 bits in 16 and clip them. With data,
what that costs, simulated bit by bit on whichever processor this is.

  kenosis-ort verify model.int8.onnx --data samples.npz

With --patterns, holds each Conv against the quantized patterns of a document
instead, oneDNN's for one, and names the clause that it breaks; no runtime is
asked.

  kenosis-ort verify model.int8.onnx --patterns onednn
""",
        (
            flags.path("model", "MODEL", "the quantized model"),
            flags.switch(
                "--strict", "exit with 1 unless every Conv/Gemm/MatMul is integer, and the same on every processor"
            ),
            flags.LIBRARIES,
            flags.argument(
                "--patterns",
                metavar="TARGET",
                help="hold each Conv against this target's documented patterns, e.g. onednn",
            ),
            flags.argument(
                "--target",
                metavar="TARGET",
                help="whose runtime to ask (default: what the file was made for, or ort-cpu)",
            ),
            flags.switch("--full", "show every float node"),
            *flags.data_arguments("data, for what clipped products cost on processors without VNNI"),
        ),
        "judging_commands:verify",
        one="with --strict: a layer runs in float or clips on some processors, or with --patterns a Conv does not "
        "match",
    ),
    "explain": Command(
        "say why nodes are integer or float, and what would change it",
        "MODEL [NODE] [options]",
        """For a float model: what quantize would do with each node, and by which rule.
For a quantized model: what the installed runtime makes of each node, read off
its optimized graph. Without NODE all float nodes that carry arithmetic.

  kenosis-ort explain model.onnx
  kenosis-ort explain model.onnx /layer1/conv/Conv
  kenosis-ort explain model.int8.onnx --json

With --times the kernel and the time of each layer: of a float model as quantize
would lay it out, by estimate; of a quantized one as the runtime runs it here, by
its profiler in fresh sessions.

  kenosis-ort explain model.onnx --times --for-host amx
  kenosis-ort explain model.int8.onnx --times --data samples.npz
""",
        (
            flags.path("model", "MODEL", "a float or a quantized model"),
            flags.argument("node", nargs="?", metavar="NODE", help="name of a node (default: all that stay float)"),
            flags.switch("--all", "without NODE: the integer nodes too"),
            flags.argument("--target", metavar="TARGET", help="the runtime in question (see: kenosis-ort targets)"),
            flags.switch("--times", "kernel, path and time of each layer"),
            flags.argument(
                "--for-host", metavar="HOST", help="with --times, of a float model: as laid out for this machine"
            ),
            flags.argument("--threads", type=flags.threads, default=1, help="with --times: of a session (default: 1)"),
            flags.LIBRARIES,
            *flags.data_arguments("what a quantized model is run on for --times (default: made up)"),
        ),
        "judging_commands:explain",
    ),
    "compare": Command(
        "show where a quantized model departs from the float one",
        "FLOAT QUANTIZED (--data SOURCE | --synthetic [N]) [options]",
        r"""Runs a float and a quantized model on the same samples and shows how far each
output agrees, which layers lose most, where the error jumps first, and what to
do next.

  kenosis-ort compare model.onnx model.int8.onnx --data test.npz
  kenosis-ort compare model.onnx model.int8.onnx --data test.npz --samples 32 \
                      --min-agreement 99%
""",
        (
            flags.path("float_model", "FLOAT", "the float model"),
            flags.path("quantized_model", "QUANTIZED", "what was made of it"),
            flags.argument(
                "--samples", type=flags.positive, help="samples to compare on (default: all that are given)"
            ),
            flags.switch("--full", f"show every layer, not the {WORST_LAYERS} that lose most"),
            flags.argument(
                "--min-agreement", type=flags.share, metavar="SHARE", help="least share of equal argmax, e.g. 99%%"
            ),
            flags.argument("--min-sqnr", type=flags.number, metavar="DB", help="least signal to noise ratio, dB"),
            _THREADS,
            flags.LIBRARIES,
            *flags.data_arguments(),
        ),
        "judging_commands:compare",
        one="done, but an output agrees less than --min-agreement or --min-sqnr demands",
    ),
    "compare-targets": Command(
        "show what each target would do to a float model",
        "MODEL [options]",
        """Plans a float model for every target, without data and without writing, and
shows side by side how many layers run in integer, what their kernels take in
and how many values carry Q/DQ; then where the plans differ.

  kenosis-ort compare-targets model.onnx
  kenosis-ort compare-targets model.onnx --target ort-cpu --target tensorrt
""",
        (
            flags.path("model", "MODEL", "a float model"),
            flags.argument(
                "--target", action="append", metavar="TARGET", help="this one (may be repeated; default: all)"
            ),
            flags.switch("--full", "show every node on which the targets differ"),
        ),
        "judging_commands:compare_targets",
    ),
    "targets": Command(
        "list the runtimes that files can be made for, and the rules of one",
        "[TARGET] [options]",
        """Lists the targets: data types, where Q/DQ stands, and whether the runtime can
be asked and timed on this machine. With TARGET its whole table: each rule with
what it rests on.

  kenosis-ort targets
  kenosis-ort targets tensorrt
  kenosis-ort quantize model.onnx --data samples.npz --target tensorrt
""",
        (flags.argument("target", nargs="?", metavar="TARGET", help="show the table of this one"),),
        "machine_commands:targets",
    ),
    "bench": Command(
        "time models against each other",
        "MODEL [MODEL ...] [options]",
        """Times models on the CPU, interleaved in random order with fresh sessions, and
says which are faster than the first one beyond the noise.

  kenosis-ort bench model.onnx model.int8.onnx --data samples.npz
  kenosis-ort bench model.onnx a.onnx b.onnx --threads 4 --seconds 60
""",
        (
            flags.argument(
                "models", type=Path, nargs="+", metavar="MODEL", help="the models; the first is the baseline"
            ),
            flags.argument(
                "--threads",
                type=flags.threads,
                default=1,
                help="of a session; 0: as the runtime likes (default: 1)",
                group=_HOW_TO_TIME,
            ),
            flags.argument(
                "--seconds", type=flags.seconds, default=20.0, help="for all of it (default: 20)", group=_HOW_TO_TIME
            ),
            flags.argument(
                "--rounds",
                type=flags.positive,
                default=15,
                help="with fresh sessions, at most (default: 15)",
                group=_HOW_TO_TIME,
            ),
            flags.LIBRARIES._replace(group=_HOW_TO_TIME),
            *flags.data_arguments("what the models are run with (default: --synthetic)"),
        ),
        "machine_commands:time_models",
        one="done, but a model did not load or run and is left out",
    ),
    "inspect": Command(
        "show what a model file holds",
        "MODEL [options]",
        """Shows inputs, outputs, operators, parameters, sizes, operator sets and whether
a model is quantized already, and how.

  kenosis-ort inspect model.onnx
  kenosis-ort inspect model.onnx --json
""",
        (
            flags.path("model", "MODEL", "any ONNX model"),
            flags.switch("--full", "show every operator"),
        ),
        "judging_commands:inspect",
    ),
    "convert": Command(
        "write a quantized model in another format",
        "MODEL [OUT] [options]",
        """Reads a quantized model (QONNX, QCDQ, QDQ or quantized operators) and writes it
in the format asked for, checked against the model as it came. What that format
cannot express is an error that names the node.

  kenosis-ort convert model.qonnx.onnx model.qdq.onnx
  kenosis-ort convert model.int8.onnx --to qop
""",
        (
            flags.path("model", "MODEL", "the quantized model"),
            flags.path("out", "OUT", "the file to write (MODEL.FORMAT.onnx)", nargs="?"),
            flags.argument(
                "--to", default="qdq", metavar="FORMAT", help="qdq (the default), qop, qcdq, qonnx or float"
            ),
            flags.LIBRARIES,
        ),
        "file_commands:convert",
    ),
    "calibrate": Command(
        "write the calibration table of a model",
        "MODEL TABLE (--data SOURCE | --synthetic [N]) [options]",
        """Runs a float model over data and writes the statistics of its activations to the
new file TABLE, which quantize takes as --table in place of the data. Tables of
several data sets can be put together with merge. A table holds up to 64 of the
samples, as they are, unless --no-samples leaves them out.

  kenosis-ort calibrate model.onnx day.json --data day.npz
  kenosis-ort calibrate model.onnx night.json --data night.npz
  kenosis-ort merge all.json day.json night.json
  kenosis-ort calibrate model.onnx all.json --data 'shards/*.npz' --dask local
  kenosis-ort quantize model.onnx --table all.json
""",
        (
            flags.path("model", "MODEL", "the float model"),
            flags.path("table", "TABLE", "the file to write"),
            flags.switch("--resume", "keep what is done in TABLE.part, and go on with what is there"),
            flags.switch("--no-samples", "keep none of the data, as passes need it where no reader is left"),
            flags.FLAGS["calibrate_method"].changed(help="how ranges are found (default: minmax)"),
            flags.LIBRARIES,
            *flags.data_arguments(),
            *flags.MACHINES,
        ),
        "file_commands:calibrate",
    ),
    "merge": Command(
        "put calibration tables of several data sets together",
        "OUT TABLE [TABLE ...] [options]",
        """Merges tables of the same model and settings into the new file OUT, as if one run
had seen all samples.

  kenosis-ort merge all.json day.json night.json
""",
        (
            _OUT,
            flags.argument("tables", type=Path, nargs="+", metavar="TABLE", help="tables that calibrate wrote"),
        ),
        "file_commands:merge",
    ),
    "fuse": Command(
        "turn the attention layers of a float model into one operator each",
        "MODEL OUT [options]",
        """Writes the float MODEL to OUT with each attention layer as one operator, whatever
exporter it came from. quantize does this as well.

  kenosis-ort fuse bert.onnx fused.onnx
""",
        (
            flags.argument("model", metavar="MODEL", help="the float model"),
            _OUT,
        ),
        "file_commands:fuse_attention",
    ),
    "weights": Command(
        "quantize the weights of linear layers and embeddings alone, to 4 or 8 bits",
        "MODEL OUT [--bits 4|8] [--data SOURCE] [options]",
        """Writes the float MODEL to OUT with the weights of its linear layers and embeddings
in blocks of few bits, which is what decoders wait for at one token. With samples
the weights are rounded so that the outputs of their layers change least.

  kenosis-ort weights decoder.onnx int4.onnx --data prompts.npz
""",
        (
            flags.path("model", "MODEL", "the float model"),
            _OUT,
            flags.argument("--bits", type=int, default=4, choices=(4, 8), help="of a weight (default: 4)"),
            flags.argument(
                "--block",
                type=int,
                default=32,
                choices=(16, 32, 64, 128, 256),
                help="weights that share a scale (default: 32)",
            ),
            flags.switch("--symmetric", "without zero points"),
            flags.switch("--no-embeddings", "leave embeddings float"),
            flags.argument("--exclude", metavar="NODE", help="a node that stays float", action="append", default=[]),
            flags.LIBRARIES,
            *flags.data_arguments(),
        ),
        "file_commands:weights",
    ),
    "sweep": Command(
        "quantize many models",
        "MODELS.toml [RESULTS] [--dask ADDRESS] [options]",
        """Quantizes every model of a file and writes one table of what came out, to the
screen and as sweep.json in the folder RESULTS (MODELS.sweep unless it is named).
A table [models.NAME] names the model and its data; what else it holds are
arguments of kenosis-ort quantize without their dashes, and [defaults] holds
those of all. Paths are relative to the file.

  [defaults]
  recipe = "accurate"

  [models.resnet]
  model = "resnet.onnx"
  data = "photos.npz"

A sweep that was ended goes on where it was: a model is left as it is where the
model, its data, its options, all versions and the output are those of the run
that made it.

  kenosis-ort sweep models.toml
  kenosis-ort sweep models.toml results/ --dask local:2
""",
        (
            flags.path("models", "MODELS.toml", "the models and their options"),
            flags.path("results", "RESULTS", "folder for outputs and the table", nargs="?"),
            flags.argument(
                "--dask",
                metavar="ADDRESS",
                help="run on the workers of the Dask scheduler at host:port that offer the resource timing=1; "
                "local:N starts N on this machine, each with processors of its own",
            ),
        ),
        "sweep_command:sweep",
        one="done, but not every model could be quantized",
    ),
    "doctor": Command(
        "show what this machine's runtime can do, and what is fast on it",
        "[options]",
        """Shows the processor, the runtime and the formats it reads, times small
convolutions and matrix products in each data type (some 3 seconds), and says
what to fix.

  kenosis-ort doctor
  kenosis-ort doctor --threads 4 --json
""",
        (
            _THREADS,
            flags.argument("--seconds", type=flags.seconds, default=3.0, help="for the timing (default: 3)"),
            flags.switch("--no-timing", "do not time data types"),
        ),
        "machine_commands:doctor",
        one="done, but there is a problem that has a fix",
    ),
    "profile": Command(
        "measure what kernels cost on this machine, so that files are laid out for it",
        "[options]",
        """Times the runtime's kernels in float and in integer by their shapes, in some 30
seconds, and keeps the result for this processor, runtime and number of threads:
later calls of quantize lay files out for it. With --out it goes to a file as
well, with which files are laid out for this machine elsewhere.

  kenosis-ort profile
  kenosis-ort profile --threads 4 --out server.json
  kenosis-ort quantize model.onnx --data samples.npz --for-host server.json
""",
        (
            flags.argument("--target", help="the runtime that is measured (default: ort-cpu)"),
            _THREADS,
            flags.argument("--seconds", type=flags.seconds, default=30.0, help="for all of it (default: 30)"),
            flags.argument("--out", type=Path, metavar="FILE.json", help="write the profile to this file too"),
            flags.argument("--name", default="", help="what reports call it (default: the processor's name)"),
        ),
        "machine_commands:profile",
    ),
    "demo": Command(
        "quantize the shipped digits net; print accuracy, speed and the fusion proof",
        "[options]",
        """Quantizes a trained CNN for handwritten digits with stock ONNX Runtime and
with kenosis-ort, and prints accuracy on held-out images, speed and the
fusion proof.

  kenosis-ort demo
  kenosis-ort demo --out models/
""",
        (
            flags.argument("--out", type=Path, metavar="FOLDER", help="keep the models there (default: thrown away)"),
            flags.argument("--batch", type=flags.positive, default=32, help="images per timed run (default: 32)"),
            flags.argument("--rounds", type=flags.positive, default=15, help="timing rounds (default: 15)"),
        ),
        "machine_commands:demo",
        one="done, but a node that was planned as integer runs in float",
    ),
    "completion": Command(
        "print the completion script of a shell",
        "SHELL",
        """Prints a script that completes kenosis-ort's commands and options, for the
shell to read.

  kenosis-ort completion bash > ~/.local/share/bash-completion/completions/kenosis-ort
  kenosis-ort completion zsh > "${fpath[1]}/_kenosis-ort"
""",
        (flags.argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS)),),
        "file_commands:completion",
    ),
}
