"""How encoded gradients travel: routes, the transport that issues collectives, and the path of a gradient."""

from lightning_commopt.routes.control import ControlGroup, FingerprintError
from lightning_commopt.routes.gradient_path import GradientPath
from lightning_commopt.routes.one_phase import OnePhase
from lightning_commopt.routes.pinned_ddp import PinnedDDP
from lightning_commopt.routes.route import Parcel, Route
from lightning_commopt.routes.summed import Summed
from lightning_commopt.routes.topology import Hierarchy, Topology, discover
from lightning_commopt.routes.transport import GlooTransport, NcclTransport, Operation, Transport
from lightning_commopt.routes.two_hop import TwoHop

__all__ = [
    "ControlGroup",
    "FingerprintError",
    "GlooTransport",
    "GradientPath",
    "Hierarchy",
    "NcclTransport",
    "OnePhase",
    "Operation",
    "Parcel",
    "PinnedDDP",
    "Route",
    "Summed",
    "Topology",
    "Transport",
    "TwoHop",
    "discover",
]
