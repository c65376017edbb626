"""The pages on models are generated from the families, and every family has published models."""

from __future__ import annotations

from docs.generate.models import KNOWN, pages
from megarl.hf.families import FAMILIES
from tests.support.megatron_models import MODELS
from tests.support.vl_model import VL_MODELS


def test_pages_are_up_to_date() -> None:
    for page, text in pages().items():
        assert text == page.read_text(), "python -m docs.generate.models writes it"


def test_every_family_names_models_and_a_test() -> None:
    assert KNOWN.keys() == FAMILIES.keys()
    for kind, (_, tiny) in KNOWN.items():
        assert set(tiny) <= {*MODELS, *VL_MODELS}, kind
