"""Weights that go to engines on the trainers' devices."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from megarl.commands.serve.session import TrainingSession
from megarl.weight_sync.placement import Colocated, Occupant


@pytest.mark.parametrize(("passes", "offload", "lost"), [(1, True, True), (0, True, False), (1, False, False)])
def test_gradients_are_not_lost_when_trainers_offload(passes: int, offload: bool, lost: bool) -> None:
    """Offloaded gradients come back as zeros: optim_step would move the weights by momentum and decay alone."""
    session: Any = object.__new__(TrainingSession)
    update = Mock(return_value={})
    session.devices = Colocated(
        Occupant(Mock(), offload=offload),
        None,
        [],
        update,
        engines_sleep=False,
        engines_asleep=False,
        start_timeout=1.0,
    )
    session.passes, session.version, session.updates, session.close_sampling = passes, 0, 3, Mock()
    if lost:
        with pytest.raises(ValueError, match="Call optim_step before the weights go to the engines"):
            session.publish()
        assert not update.called and not session.close_sampling.called
    else:
        assert session.publish() == 1 and session.sampled_updates == 3
        update.assert_called_once_with(1)
