"""Commands about capsules, and what other workers ask for of them: answers each, now or once it is done."""

from collections.abc import Callable
from functools import partial

from mallee.protocol.errors import IncompatibleCapsule, MalleeError, UnknownCapsule
from mallee.protocol.hashing import NO_HASHES
from mallee.protocol.ids import CapsuleId
from mallee.protocol.messages import (
    CapsuleCommand,
    CapsuleReply,
    CapsuleStatus,
    Capture,
    Delete,
    Demote,
    Inspect,
    Pin,
    Prefill,
    Promote,
    Rewind,
    Share,
)
from mallee.worker.capsules.capsule import Capsule, block_keys
from mallee.worker.capsules.moves import CapsuleMoves, Reply
from mallee.worker.capsules.record import checked_loan
from mallee.worker.capsules.registry import CapsuleRegistry
from mallee.worker.forward import Forward
from mallee.worker.kv.tree import BranchTree
from mallee.worker.requests import RequestTable
from mallee.worker.sched.branch import Branch, CapsuleState, Lent
from mallee.worker.transfer.loans import Loans
from mallee.worker.transfer.values import Ask, Loan
from mallee.worker.updates import UpdateSink


class CapsuleCommands:
    """Carries out commands about capsules of one engine."""

    def __init__(
        self,
        tree: BranchTree,
        capsules: CapsuleRegistry,
        moves: CapsuleMoves,
        loans: Loans,
        *,
        requests: RequestTable,
        updates: UpdateSink,
        block_nbytes: int,
    ) -> None:
        self._tree = tree
        self._capsules = capsules
        self._moves = moves
        self._loans = loans
        self._requests = requests
        self._updates = updates
        self._block_nbytes = block_nbytes

    def submit(self, command: CapsuleCommand, gateway: str) -> None:
        """Answer a command about a capsule: now, when it has moved, or when its branch is at a boundary."""
        reply = partial(self._reply, command.request, gateway)
        try:
            match command:
                case Capture():
                    capsule = self._requests.capture(command, gateway)
                    if capsule is not None:  # else it is taken later
                        reply(capsule.id, None)
                case Rewind():
                    reply(self._capsules.rewind(command).id, None)
                case Pin():
                    self._moves.renew(self._capsules.pin(command), reply)
                case Inspect():
                    self._send(command.request, gateway, self._status(command.capsule))
                case Demote():
                    self._moves.demote(command, reply)
                case Promote():
                    command.share.validate()
                    self._promote(command.capsule, command.share, reply)
                case Delete():
                    self._delete(command, gateway)
        except MalleeError as error:
            self._send(command.request, gateway, error)

    def submit_captures(self) -> None:
        """Captures that waited for a boundary are tried again."""
        captures, self._requests.captures = self._requests.captures, []
        for command, gateway in captures:
            self.submit(command, gateway)

    def _promote(self, name: str, share: Share, reply: Reply) -> None:
        capsule = self._capsules.get(name)
        if capsule.node is None and not capsule.num_computed:  # nothing is below to come back
            root = self._tree.attach(NO_HASHES, capsule.salt, 0)
            capsule = self._capsules.restore(capsule, root)
        if capsule.node is not None:
            reply(capsule.id, None)
        else:
            self._moves.restore(capsule, share, reply)

    def _delete(self, command: Delete, gateway: str) -> None:
        """The answer has the capsule as it was."""
        before: CapsuleStatus | MalleeError
        try:
            before = self._status(command.capsule)
        except UnknownCapsule as error:
            before = error
        self._requests.cancel_making(command.capsule)

        def reply(capsule: CapsuleId, error: MalleeError | None) -> None:
            self._send(command.request, gateway, error or before)

        self._moves.delete(CapsuleId(command.capsule), reply)

    def status(self, capsule: Capsule) -> CapsuleStatus:
        """`capsule`, which is here, as it is now."""
        return self._capsules.status(capsule, self._block_nbytes)

    def _status(self, capsule: str) -> CapsuleStatus:
        """A capsule as it is now, or as far as it is computed. Raises UnknownCapsule."""
        found = self._capsules.peek(capsule)
        if found is not None:
            return self.status(found)
        making = self._requests.making(capsule)
        if making is None:
            raise UnknownCapsule(capsule)
        return making

    def _reply(
        self, request: str, gateway: str, capsule: CapsuleId, error: MalleeError | None
    ) -> None:
        """Answer with `capsule` as it is now, or the reason why it is not as it was to be."""
        try:
            self._send(request, gateway, error or self._status(capsule))
        except UnknownCapsule as unknown:
            self._send(request, gateway, unknown)

    def _send(self, request: str, gateway: str, answer: CapsuleStatus | MalleeError) -> None:
        if isinstance(answer, MalleeError):
            self._updates.reply(gateway, CapsuleReply(request, error=answer.to_wire()))
        else:
            self._updates.reply(gateway, CapsuleReply(request, answer))

    # Other workers

    def lend(self, ask: Ask, answer: Callable[[Loan | MalleeError], None]) -> None:
        """Lend blocks to another worker.

        `answer` gets the loan, or the reason why there is none: UnknownCapsule, IncompatibleCapsule,
        WorkerLost, LoansFull; later, if a capsule has to come back from below first.
        """

        def restored(capsule: CapsuleId, error: MalleeError | None) -> None:
            try:
                loan = None if error is not None else self._loans.lend(ask)
            except MalleeError as failure:
                loan, error = None, failure
            answer(loan or error or UnknownCapsule(capsule))

        try:
            loan = self._loans.lend(ask)
            if loan is None:
                self._promote(ask.holder.capsule, Share(), restored)
                return
        except MalleeError as error:
            answer(error)
            return
        answer(loan)


class PeerCapsules:
    """Reads capsules that other workers lend: see `sched.fetching.CapsuleReader`."""

    def __init__(self, tree: BranchTree, forward: Forward) -> None:
        self._tree = tree
        self._forward = forward

    def identity(self) -> str:
        return self._forward.spec.identity

    def opened(self, branch: Branch, loan: Loan) -> Lent:
        pull, salt = branch.job.pull, branch.job.salt
        assert pull is not None, "no holder was asked"
        if not isinstance(branch.job.command, Prefill):
            raise IncompatibleCapsule("", [("command", "a capsule", "an answer")])
        record = checked_loan(loan, branch.tokens, self._tree, self._forward.spec)
        logits = None if record.logits is None else self._forward.undump(record.logits)
        pull.state = CapsuleState(record.continuation, record.grammar, logits)
        keys = block_keys(self._tree, branch.tokens[: record.num_computed], salt)
        return Lent(
            loan,
            (*keys, *self._tree.side_keys(keys, record.num_computed)),
            num_blocks=len(keys),
            num_tokens=record.num_computed,
            is_capsule=True,
            is_foreign=record.salt != salt,
        )
