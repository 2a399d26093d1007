"""The names of `kenosis_ort.passes`, by the module that defines each."""

from kenosis_ort.passes.contract import Build as Build
from kenosis_ort.passes.contract import Candidate as Candidate
from kenosis_ort.passes.contract import Context as Context
from kenosis_ort.passes.contract import Pass as Pass
from kenosis_ort.passes.contract import Skipped as Skipped
from kenosis_ort.passes.contract import State as State
from kenosis_ort.passes.contract import Statistics as Statistics
from kenosis_ort.passes.contract import WeightPass as WeightPass
from kenosis_ort.passes.contract import changed_weights as changed_weights
from kenosis_ort.passes.order import PASSES as PASSES
from kenosis_ort.passes.order import passes_of as passes_of
from kenosis_ort.passes.order import register as register
from kenosis_ort.passes.order import registered as registered
from kenosis_ort.passes.recipe import between as between
