"""Start the processes of actor and critic, at the start of a run and after one of them has failed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarl.algorithms.advantages import uses_critic
from megarl.batching.flops import ModelFlops
from megarl.cluster.base import Cluster, WorkerGroup
from megarl.recipe import Recipe
from megarl.recipe.derived.critic_view import critic_view
from megarl.recipe.derived.offload import offloads
from megarl.recipe.schema import TrainConfig
from megarl.trainer.group import ActorGroup, CriticGroup, require_shared_storage
from megarl.trainer.kept import Way, judge_kept, settings_digest
from megarl.trainer.restarts import TrainerRestarts
from megarl.weight_sync.placement import Occupant, Placement

ACTOR = "megarl.trainer.actor:ActorWorker"
CRITIC = "megarl.trainer.critic:CriticWorker"


@dataclass
class Learners:
    """Actor and critic (None: the recipe has none), and which of them are on the devices that they may share."""

    actor: ActorGroup
    actor_on_devices: Occupant
    critic: CriticGroup | None
    critic_on_devices: Occupant | None

    @classmethod
    def start(
        cls,
        recipe: Recipe,
        cluster: Cluster,
        platform: str,
        directory: Path,
        actor_flops: ModelFlops | None,
        critic_flops: ModelFlops | None,
        resumes: tuple[int, bool] = (0, False),
    ) -> Learners:
        """Start all processes, or take the ones of an earlier controller (`train.keep_workers`).

        directory: the run's, which they must see. platform: name of the device's kind. resumes: the step after which the run goes
        on, and whether there is a checkpoint before it, or of it.
        """
        actor = ActorGroup(_actor_workers(recipe, cluster), recipe, actor_flops)
        require_shared_storage(actor, directory)
        learners = cls(actor, Occupant(actor, offload=offloads(recipe, platform)), None, None)
        if uses_critic(recipe.algorithm):
            learners.actor_on_devices.offload()  # both may share devices
            view = critic_view(recipe)
            critic = learners.critic = CriticGroup(_critic_workers(recipe, cluster), view, critic_flops)
            require_shared_storage(critic, directory)
            learners.critic_on_devices = Occupant(critic, offload=offloads(view, platform))
            learners.critic_on_devices.offload()
            critic.describe()
        step, has_checkpoint = resumes
        if judge_kept(learners.groups, recipe.algorithm, step, has_checkpoint=has_checkpoint) is Way.START:
            learners.restart(recipe, cluster, Placement())
        return learners

    @property
    def groups(self) -> list[ActorGroup | CriticGroup]:
        return [group for group in (self.actor, self.critic) if group is not None]

    def restarts(self, recipe: Recipe, cluster: Cluster, devices: Placement) -> TrainerRestarts | None:
        """Return what starts failed processes again; None if the recipe does not want it."""
        most = recipe.train.trainer_restarts

        def check() -> None:
            cluster.check()
            self.check()

        return TrainerRestarts(most, partial(self.restart, recipe, cluster, devices), check) if most else None

    def restart(self, recipe: Recipe, cluster: Cluster, devices: Placement) -> None:
        """End all processes, and start new ones with the starting model behind the same handles."""
        cluster.end_trainers()
        devices.prepare_trainers_restart()
        self.actor.workers = _actor_workers(recipe, cluster)
        self.actor_on_devices.on_device = True
        self.actor.describe()
        if self.critic is not None and self.critic_on_devices is not None:
            self.actor_on_devices.offload()
            self.critic.workers = _critic_workers(recipe, cluster)
            self.critic_on_devices.on_device = True
            self.critic_on_devices.offload()
            self.critic.describe()

    def load_checkpoint(self, devices: Placement, folder: Path) -> list[str | None]:
        """Load a checkpoint into all processes. Returns the ranks' notices, the actor's first: see `TrainerGroup`."""
        notices: list[str | None] = []
        if self.critic is not None:
            devices.give_to_critic()
            notices = self.critic.load_checkpoint(folder / "critic")
        devices.give_to_actor()
        return self.actor.load_checkpoint(folder / "trainer") + notices

    def check(self) -> None:
        """Raise the failure of an idle process that `Cluster.check` has found, if there is one."""
        for group in (self.actor, self.critic):
            if group is not None and group.workers.failure is not None:
                raise group.workers.failure


def _actor_workers(recipe: Recipe, cluster: Cluster) -> WorkerGroup:
    updated_steps = recipe.train.steps - recipe.critic.warmup_steps  # warmup_steps is 0 without a critic
    args = (recipe, updated_steps * recipe.actor.optimizer_steps)
    essential, settings = _essential(recipe.train), settings_digest(recipe, ACTOR)
    return cluster.start_trainers(ACTOR, recipe.cluster.trainers, args, essential=essential, settings=settings)


def _critic_workers(recipe: Recipe, cluster: Cluster) -> WorkerGroup:
    view = critic_view(recipe)
    args = (view, recipe.train.steps * view.actor.optimizer_steps)
    essential, settings = _essential(recipe.train), settings_digest(recipe, CRITIC)
    return cluster.start_trainers(
        CRITIC, recipe.critic.trainers, args, name="critic", essential=essential, settings=settings
    )


def _essential(train: TrainConfig) -> bool:
    return train.trainer_restarts == 0
