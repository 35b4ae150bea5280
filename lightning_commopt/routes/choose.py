"""Which route a method takes."""

from lightning_commopt.compression import Compression, Scratch
from lightning_commopt.measure import Recorder
from lightning_commopt.routes.one_phase import OnePhase
from lightning_commopt.routes.route import Route
from lightning_commopt.routes.summed import Summed
from lightning_commopt.routes.transport import Transport
from lightning_commopt.routes.two_hop import TwoHop

__all__ = ["route_for"]


def route_for(method: Compression, transport: Transport, scratch: Scratch, recorder: Recorder) -> Route:
    """Return the route on which a method sends the fewest bytes with the least latency."""
    if method.summable:
        return Summed(transport, scratch, recorder)
    route = OnePhase if transport.world <= 2 else TwoHop
    return route(transport, scratch, recorder)
