"""The commands that write models and tables."""

from typing import Final

from kenosis_ort.cli import flags
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
