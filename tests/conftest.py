import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread():
    """Sums are then added in one order on every machine, and small tensors are faster."""
    torch.set_num_threads(1)
