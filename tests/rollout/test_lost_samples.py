"""A machine of engines is lost, and with it samples of finished groups: these groups are sampled again."""

from __future__ import annotations

import pytest

from tests.support.elastic_engines import ElasticEngines


@pytest.mark.parametrize(("rule", "batch"), [("refresh", [0, 2, 4, 1]), ("drain", [0, 1, 2, 3])])
def test_they_return_to_their_batch(rule: str, batch: list[int]) -> None:
    """Also groups of a complete batch. With `refresh`, other groups may take their places in it."""
    engines = ElasticEngines(2, at_update=rule)
    source = engines.source
    source.admit(0)
    engines.services[0].finish(0, 2, 4)
    engines.services[1].finish(1, 3)
    assert len(source.admission.closed) == 1 and engines.running() == [[6], [5, 7]]
    engines.services[1].die()
    engines.lose(1, 3)
    engines.check()
    assert engines.running() == [[1, 3, 5, 6, 7], []] and not source.admission.closed
    assert "the samples of 2 finished groups were lost with a machine: other engines resample them" in engines.notices
    assert engines.fleet.take_metrics()["fleet/sampled_again"] == 4, "2 that ran, and 2 finished ones"
    engines.services[0].finish(1)
    engines.check()
    assert engines.finished() == [0, 1, 2, 4] and source.admission.running == 4
    engines.services[0].finish(3, 5, 6, 7)
    assert engines.step(1) == batch and engines.running()[0] == [8, 9, 10, 11]


def test_lost_samples_wait_for_the_end_of_an_update() -> None:
    engines = ElasticEngines(2)
    engines.source.admit(0)
    engines.services[0].finish(0, 2)
    engines.lose(2)
    with engines.fleet.update():
        engines.check()
        assert engines.finished() == [0, 2]
    engines.check()
    assert engines.finished() == [0] and 2 in engines.all_running()
