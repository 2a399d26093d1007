"""The commands as the shell has them: those that write models and tables, and those that look at what is there."""

from typing import Final

from kenosis_ort.cli import flags, parser
from kenosis_ort.cli.flags import Command

_OUT: Final = flags.path("out", "OUT", "the file to write")


class Quantize(Command):
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
    """

    name = "quantize"
    summary = "quantize a float model to INT8"
    arguments = (
        flags.path("model", "MODEL", "the float model"),
        flags.path("out", "OUT", "the file to write (default: MODEL with the suffix .int8.onnx)", nargs="?"),
        *flags.data_arguments("calibration data"),
        *flags.OPTIONS,
        *flags.MACHINES,
    )
    function = "quantize_command:quantize"
    one = (
        "done, but the fusion proof shows float kernels where integer ones were planned; with --strict also where "
        "the file holds a float model"
    )
    first = (
        *("--data", "--synthetic", "--recipe", "--accuracy-budget", "--target", "--exclude", "--report"),
        *("--dry-run", "--eval-data", "--metric", "--json", "-q", "-v"),
    )
    needs_data = True


class Convert(Command):
    """Reads a quantized model (QONNX, QCDQ, QDQ or quantized operators) and writes it
    in the format asked for, checked against the model as it came. What that format
    cannot express is an error that names the node.

      kenosis-ort convert model.qonnx.onnx model.qdq.onnx
      kenosis-ort convert model.int8.onnx --to qop
    """

    name = "convert"
    summary = "write a quantized model in another format"
    arguments = (
        flags.path("model", "MODEL", "the quantized model"),
        flags.path("out", "OUT", "the file to write (MODEL.FORMAT.onnx)", nargs="?"),
        flags.argument("--to", "FORMAT", "qdq, qop, qcdq, qonnx or float", default="qdq"),
        flags.LIBRARIES,
    )
    function = "file_commands:convert"


class Calibrate(Command):
    """Runs a float model over data and writes the statistics of its activations to the
    new file TABLE, which quantize takes as --table in place of the data. Tables of
    several data sets can be put together with merge. A table holds up to 64 of the
    samples, as they are, unless --no-samples leaves them out.

      kenosis-ort calibrate model.onnx day.json --data day.npz
      kenosis-ort calibrate model.onnx night.json --data night.npz
      kenosis-ort merge all.json day.json night.json
      kenosis-ort calibrate model.onnx all.json --data 'shards/*.npz' --dask local
      kenosis-ort quantize model.onnx --table all.json
    """

    name = "calibrate"
    summary = "write the calibration table of a model"
    arguments = (
        flags.path("model", "MODEL", "the float model"),
        flags.path("table", "TABLE", "the file to write"),
        flags.switch("--no-samples", "keep none of the data, as passes need it where no reader is left"),
        flags.FLAGS["calibrate_method"].changed(help="how ranges are found (default: minmax)"),
        flags.LIBRARIES,
        *flags.data_arguments(),
        *flags.MACHINES,
    )
    function = "file_commands:calibrate"
    needs_data = True


class Merge(Command):
    """Merges tables of the same model and settings into the new file OUT, as if one run
    had seen all samples.

      kenosis-ort merge all.json day.json night.json
    """

    name = "merge"
    summary = "put calibration tables of several data sets together"
    arguments = (_OUT, flags.path("tables", "TABLE", "tables that calibrate wrote", nargs="+"))
    function = "file_commands:merge"


class Fuse(Command):
    """Writes the float MODEL to OUT with each attention layer as one operator, whatever
    exporter it came from. quantize does this as well.

      kenosis-ort fuse bert.onnx fused.onnx
    """

    name = "fuse"
    summary = "turn the attention layers of a float model into one operator each"
    arguments = (flags.path("model", "MODEL", "the float model"), _OUT)
    function = "file_commands:fuse_attention"


class QuantizeWeights(Command):
    """Writes the float MODEL to OUT with the weights of its linear layers and embeddings
    in blocks of few bits, which is what decoders wait for at one token. With samples
    the weights are rounded so that the outputs of their layers change least.

      kenosis-ort weights decoder.onnx int4.onnx --data prompts.npz
    """

    name = "weights"
    summary = "quantize the weights of linear layers and embeddings alone, to 4 or 8 bits"
    arguments = (
        flags.path("model", "MODEL", "the float model"),
        _OUT,
        flags.argument("--bits", text="of a weight", type=int, default=4, choices=(4, 8)),
        flags.argument(
            "--block", text="weights that share a scale", type=int, default=32, choices=(16, 32, 64, 128, 256)
        ),
        flags.switch("--symmetric", "without zero points"),
        flags.switch("--no-embeddings", "leave embeddings float"),
        flags.repeated("--exclude", "NODE", "a node that stays float"),
        flags.LIBRARIES,
        *flags.data_arguments(),
    )
    function = "file_commands:weights"


class SweepModels(Command):
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
    """

    name = "sweep"
    summary = "quantize many models"
    arguments = (
        flags.path("models", "MODELS.toml", "the models and their options"),
        flags.path("results", "RESULTS", "folder for outputs and the table", nargs="?"),
        flags.argument(
            "--dask",
            "ADDRESS",
            "run on the workers of the Dask scheduler at host:port that offer the resource timing=1; "
            "local:N starts N on this machine, each with processors of its own",
        ),
    )
    function = "sweep_command:sweep"
    one = "done, but not every model could be quantized"


_THREADS: Final = flags.argument("--threads", text="of a session; 0: all", type=parser.threads, default=1)


class Verify(Command):
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
    """

    name = "verify"
    summary = "show which kernel of the runtime executes each node of a model"
    arguments = (
        flags.path("model", "MODEL", "the quantized model"),
        flags.switch("--strict", "exit with 1 unless each layer is integer, and the same on every processor"),
        flags.LIBRARIES,
        flags.argument("--patterns", "TARGET", "hold each Conv against its documented patterns, e.g. onednn"),
        flags.argument("--target", "TARGET", "whose runtime to ask (default: the file's, or ort-cpu)"),
        flags.switch("--full", "show every float node"),
        *flags.data_arguments("data, for what clipped products cost on processors without VNNI"),
    )
    function = "judging_commands:verify"
    one = "with --strict: a layer runs in float or clips on some processors, or with --patterns a Conv does not match"


class Explain(Command):
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
    """

    name = "explain"
    summary = "say why nodes are integer or float, and what would change it"
    arguments = (
        flags.path("model", "MODEL", "a float or a quantized model"),
        flags.argument("node", "NODE", "name of a node (default: all that stay float)", nargs="?"),
        flags.switch("--all", "without NODE: the integer nodes too"),
        flags.argument("--target", "TARGET", "the runtime in question (see: kenosis-ort targets)"),
        flags.switch("--times", "kernel, path and time of each layer"),
        flags.argument(
            "--for-host", "HOST", "with --times, of a float model: as laid out for this machine", dest="host"
        ),
        _THREADS,
        flags.LIBRARIES,
        *flags.data_arguments("what a quantized model is run on for --times (default: made up)"),
    )
    function = "judging_commands:explain"


class Compare(Command):
    r"""Runs a float and a quantized model on the same samples and shows how far each
    output agrees, which layers lose most, where the error jumps first, and what to
    do next.

      kenosis-ort compare model.onnx model.int8.onnx --data test.npz
      kenosis-ort compare model.onnx model.int8.onnx --data test.npz --samples 32 \
                          --min-agreement 99%
    """

    name = "compare"
    summary = "show where a quantized model departs from the float one"
    arguments = (
        flags.path("float_model", "FLOAT", "the float model"),
        flags.path("quantized_model", "QUANTIZED", "what was made of it"),
        flags.argument("--samples", text="samples to compare on (default: all)", type=parser.positive),
        flags.switch("--full", "show every layer, not the 8 that lose most"),
        flags.argument("--min-agreement", "SHARE", "least share of equal argmax, e.g. 99%%", type=parser.share),
        flags.argument("--min-sqnr", "DB", "least signal to noise ratio, dB", type=parser.number),
        _THREADS,
        flags.LIBRARIES,
        *flags.data_arguments(),
    )
    function = "judging_commands:compare"
    one = "done, but an output agrees less than --min-agreement or --min-sqnr demands"
    needs_data = True


class CompareTargets(Command):
    """Plans a float model for every target, without data and without writing, and
    shows side by side how many layers run in integer, what their kernels take in
    and how many values carry Q/DQ; then where the plans differ.

      kenosis-ort compare-targets model.onnx
      kenosis-ort compare-targets model.onnx --target ort-cpu --target tensorrt
    """

    name = "compare-targets"
    summary = "show what each target would do to a float model"
    arguments = (
        flags.path("model", "MODEL", "a float model"),
        flags.argument("--target", "TARGET", "this one (may be repeated; default: all)", action="append"),
        flags.switch("--full", "show every node on which the targets differ"),
    )
    function = "judging_commands:compare_targets"


class Targets(Command):
    """Lists the targets: data types, where Q/DQ stands, and whether the runtime can
    be asked and timed on this machine. With TARGET its whole table: each rule with
    what it rests on.

      kenosis-ort targets
      kenosis-ort targets tensorrt
      kenosis-ort quantize model.onnx --data samples.npz --target tensorrt
    """

    name = "targets"
    summary = "list the runtimes that files can be made for, and the rules of one"
    arguments = (flags.argument("target", "TARGET", "show the table of this one", nargs="?"),)
    function = "machine_commands:targets"


class Bench(Command):
    """Times models on the CPU, interleaved in random order with fresh sessions, and
    says which are faster than the first one beyond the noise.

      kenosis-ort bench model.onnx model.int8.onnx --data samples.npz
      kenosis-ort bench model.onnx a.onnx b.onnx --threads 4 --seconds 60
    """

    name = "bench"
    summary = "time models against each other"
    arguments = (
        flags.path("models", "MODEL", "the models; the first is the baseline", nargs="+"),
        _THREADS,
        flags.argument("--seconds", text="for all of it", type=parser.seconds, default=20),
        flags.argument("--rounds", text="with fresh sessions, at most", type=parser.positive, default=15),
        flags.LIBRARIES,
        *flags.data_arguments("what the models are run with (default: --synthetic)"),
    )
    function = "machine_commands:time_models"
    one = "done, but a model did not load or run and is left out"


class Inspect(Command):
    """Shows inputs, outputs, operators, parameters, sizes, operator sets and whether
    a model is quantized already, and how.

      kenosis-ort inspect model.onnx
      kenosis-ort inspect model.onnx --json
    """

    name = "inspect"
    summary = "show what a model file holds"
    arguments = (flags.path("model", "MODEL", "any ONNX model"), flags.switch("--full", "show every operator"))
    function = "judging_commands:inspect"


class Doctor(Command):
    """Shows the processor, the runtime and the formats it reads, times small
    convolutions and matrix products in each data type (some 3 seconds), and says
    what follows.

      kenosis-ort doctor
      kenosis-ort doctor --threads 4 --json
    """

    name = "doctor"
    summary = "show what this machine's runtime can do, and what is fast on it"
    arguments = (
        _THREADS,
        flags.argument("--seconds", text="for the timing", type=parser.seconds, default=3),
        flags.switch("--no-timing", "do not time data types"),
    )
    function = "machine_commands:doctor"


class Profile(Command):
    """Times the runtime's kernels in float and in integer by their shapes, in some 30
    seconds, and keeps the result for this processor, runtime and number of threads:
    later calls of quantize lay files out for it. With --out it goes to a file as
    well, with which files are laid out for this machine elsewhere.

      kenosis-ort profile
      kenosis-ort profile --threads 4 --out server.json
      kenosis-ort quantize model.onnx --data samples.npz --for-host server.json
    """

    name = "profile"
    summary = "measure what kernels cost on this machine, so that files are laid out for it"
    arguments = (
        flags.argument("--target", text="the runtime that is measured (default: ort-cpu)"),
        _THREADS,
        flags.argument("--seconds", text="for all of it", type=parser.seconds, default=30),
        flags.path("--out", "FILE.json", "write the profile to this file too"),
        flags.argument("--name", text="what reports call it (default: the processor's name)", default=""),
    )
    function = "machine_commands:profile"


class Demo(Command):
    """Quantizes a trained CNN for handwritten digits with stock ONNX Runtime and
    with kenosis-ort, and prints accuracy on held-out images, speed and the
    fusion proof.

      kenosis-ort demo
      kenosis-ort demo --out models/
    """

    name = "demo"
    summary = "quantize the shipped digits net; print accuracy, speed and the fusion proof"
    arguments = (
        flags.path("--out", "FOLDER", "keep the models there (default: thrown away)"),
        flags.argument("--batch", text="images per timed run", type=parser.positive, default=32),
        flags.argument("--rounds", text="timing rounds", type=parser.positive, default=15),
    )
    function = "machine_commands:demo"
    one = "done, but a node that was planned as integer runs in float"
