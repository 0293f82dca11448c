"""Rules of the settings under `weights`."""

import pytest

from limes.config import load_config
from limes.config.weight_checks import READ_BY
from limes.config.weights import WeightsConfig

BASE = {"rollout.num_rollout": 1}


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "disk", "delta"])
def test_roles_of_one_process_share_their_tensors(transport):
    with pytest.raises(ValueError, match=f"weights.transport = {transport} needs engines in processes of their own"):
        load_config(None, BASE | {"weights.transport": transport})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bucket_bytes", 1),
        ("pause_mode", "abort"),
        ("host", "10.0.0.1"),
        ("disk_dir", "x"),
        ("keep_files", True),
        ("check_update_equal", True),
        ("timeout_s", 1.0),
    ],
)
def test_a_setting_that_the_transport_does_not_read_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"weights\.{name} = .* has no effect with weights.transport = shared"):
        load_config(None, BASE | {f"weights.{name}": value})


def test_every_setting_is_read_by_a_transport():
    assert {"transport", *READ_BY} == set(WeightsConfig.model_fields)
