"""How new weights reach the engines: one way a file, one protocol (`limes.weights.sender`)."""

from limes.weights.build import build_sender
from limes.weights.check import check_update, differing_weights
from limes.weights.engine import EngineWeights
from limes.weights.names import TensorSpec, WeightError, named_weights
from limes.weights.peers import LocalPeer, PipePeer, serve_pipe
from limes.weights.receiver import WeightReceiver
from limes.weights.sender import UpdateReport, WeightSender
from limes.weights.source import ModuleSource, WeightSource, drain

__all__ = [
    "EngineWeights",
    "LocalPeer",
    "ModuleSource",
    "PipePeer",
    "TensorSpec",
    "UpdateReport",
    "WeightError",
    "WeightReceiver",
    "WeightSender",
    "WeightSource",
    "build_sender",
    "check_update",
    "differing_weights",
    "drain",
    "named_weights",
    "serve_pipe",
]
