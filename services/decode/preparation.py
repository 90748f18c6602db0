"""What is done beside the step thread before a sequence can run."""

from __future__ import annotations

from collections.abc import Callable

from criticalkv.services.decode.opening import ChainOpener, OpenedChain
from criticalkv.services.decode.pages import Pages
from criticalkv.services.decode.publication import Publication
from criticalkv.services.decode.resident import Residents, copied_chain
from criticalkv.services.decode.sequence import Sequence
from criticalkv.services.decode.stepwise_kv import StepwiseKV
from criticalkv.services.decode.turn_kv import TurnKV
from criticalkv.shared.model.loader import LoadedModel

Check = Callable[[], None]


class Preparation:
    """Brings nodes into the pool, and what a sequence's own pages begin with."""

    def __init__(
        self,
        model: LoadedModel,
        pages: Pages,
        residents: Residents,
        opener: ChainOpener,
        publication: Publication,
    ) -> None:
        self._model = model
        self._pages = pages
        self._residents = residents
        self._opener = opener
        self._publication = publication

    def pull(self, opened: OpenedChain, check: Check) -> None:
        """Pull the nodes that a sequence has to; whoever waits for them learns by them.

        The caller has counted this job as a user of each: it may outlive the sequence.
        """
        try:
            self._opener.pull(opened.to_pull, check)
        finally:
            for node in opened.to_pull:
                self._residents.leave(node)

    def fill(self, sequence: Sequence, check: Check) -> None:
        """Bring back what was swapped out, or copy the chain for a stepwise turn."""
        kv = sequence.kv
        assert isinstance(kv, TurnKV)
        if sequence.policy is not None:
            for view in kv.views:
                view.node.wait_for(self._model.spec.num_layers - 1, check)
            chain = copied_chain(self._pages, kv.views)
            stepwise = StepwiseKV(self._model, sequence.policy, chain, self._pages)
            stepwise.ballast = kv.keep_own(kv.capacity)
            sequence.kv = stepwise
            kv.close()
        elif sequence.swapped is not None:
            cache = self._publication.read_back(sequence.swapped, check)
            sequence.swapped = None
            if cache is None:
                sequence.forwarded = 0  # its tokens run once more
            else:
                kv.restore(cache)
