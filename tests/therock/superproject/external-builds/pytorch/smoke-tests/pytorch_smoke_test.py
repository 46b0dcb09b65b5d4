import pytest
import torch


@pytest.fixture
def targets():
    return torch.targets()


def test_it_has_code_for_a_gpu(targets):
    assert targets.startswith("torch for: gfx")
