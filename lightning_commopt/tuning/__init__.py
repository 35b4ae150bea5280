"""Measures link and codecs, predicts what a method would give, and chooses one."""

from lightning_commopt.tuning.codec_probe import probe_codec, probe_contention
from lightning_commopt.tuning.cost_model import ComputeProfile, Prediction, predict
from lightning_commopt.tuning.decision import Choice, Decision
from lightning_commopt.tuning.evidence import Evidence
from lightning_commopt.tuning.link_probe import probe_link
from lightning_commopt.tuning.links import Channel, Link
from lightning_commopt.tuning.measurements import Ways
from lightning_commopt.tuning.memory import expected_bytes, largest_state_bytes, memory_advice
from lightning_commopt.tuning.plan import CodecCost, Plan, bucket_numels
from lightning_commopt.tuning.policy import AutoPolicy
from lightning_commopt.tuning.state import AutoState
from lightning_commopt.tuning.tuner import Observed, Tuner

__all__ = [
    "AutoPolicy",
    "AutoState",
    "Channel",
    "Choice",
    "CodecCost",
    "ComputeProfile",
    "Decision",
    "Evidence",
    "Link",
    "Observed",
    "Plan",
    "Prediction",
    "Tuner",
    "Ways",
    "bucket_numels",
    "expected_bytes",
    "largest_state_bytes",
    "memory_advice",
    "predict",
    "probe_codec",
    "probe_contention",
    "probe_link",
]
