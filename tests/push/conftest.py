import pytest
from huggingface_hub import HfApi, constants


@pytest.fixture
def api(hub, monkeypatch):
    """A client of the hub here that does not wait before it tries again."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    return HfApi(endpoint=hub.url, token="hf_fake")
