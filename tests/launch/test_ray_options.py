"""The strategies of Ray Train: asked for by name, refused where Ray decides. `test_commands` trains with them."""

import sys
from typing import Any

import pytest

import lightning_commopt
import lightning_commopt.strategies

NAMES = ("RayCommOptStrategy", "RayCommOptDeepSpeedStrategy")


@pytest.mark.parametrize("name", NAMES)
def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, "lightning_commopt.strategies.ray", raising=False)
    monkeypatch.delattr(lightning_commopt.strategies, "ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray.train.lightning", None)  # as if it was not installed
    with pytest.raises(ImportError, match=r"pip install 'lightning-commopt\[ray\]'"):
        getattr(lightning_commopt, name)


def test_other_names_are_still_missing() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'RayStrategy'"):
        lightning_commopt.RayStrategy  # noqa: B018


@pytest.mark.skipif(sys.platform != "linux", reason="Ray is installed on Linux")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"process_group_backend": "gloo"}, r"TorchConfig\(backend"),
        ({"timeout": 60}, r"TorchConfig\(timeout_s"),
        ({"start_method": "fork"}, r"ScalingConfig\(num_workers"),
    ],
    ids=str,
)
def test_what_ray_decides_is_refused(name: str, option: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=rf"`{next(iter(option))}=.*cannot be honoured: Ray Train.*{told}"):
        getattr(lightning_commopt, name)(**option)


@pytest.mark.skipif(sys.platform != "linux", reason="Ray is installed on Linux")
def test_outside_of_a_worker_it_says_where_to_run() -> None:
    strategy = lightning_commopt.RayCommOptStrategy("int8")
    with pytest.raises(RuntimeError, match="run the Trainer in the training function of a `TorchTrainer`"):
        strategy.setup_environment()
