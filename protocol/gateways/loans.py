"""Messages between gateways about budgets: each is kept by one, which lends others what they spend of it."""

from typing import Final, NamedTuple, TypeAlias

import msgspec

from mallee.protocol.codec import Decoder


class Amounts(NamedTuple):
    """Of each resource that is counted."""

    tokens: int = 0
    branches: int = 0


class Lent(NamedTuple):
    """The amounts that a holder was lent so far, all in all; None: nothing bounds it."""

    tokens: int | None = None
    branches: int | None = None


class LoanAsk(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A holder has `used` so much of what it was `lent`, and needs so much more, or wishes for more tokens.

    One that needs nothing goes on to hold what it has. A holder is one gateway's for as long as something
    runs there on the account, and is named anew after that.
    """

    holder: str
    used: Amounts
    lent: Amounts
    need: Amounts
    wish: int = 0


class LoanReturn(msgspec.Struct, frozen=True, array_like=True, tag="return"):
    """A holder has `used` so much, and keeps nothing of the rest."""

    holder: str
    used: Amounts


class BudgetAsk(msgspec.Struct, frozen=True, array_like=True, tag="show"):
    """A question for a `BudgetView`."""


class BudgetChange(msgspec.Struct, frozen=True, array_like=True, tag="change"):
    """New limits, the time from now on; None: none. Answered with a `BudgetView`."""

    tokens: int | None
    branches: int | None
    wall_s: float | None


BudgetMessage: TypeAlias = LoanAsk | LoanReturn | BudgetAsk | BudgetChange


class ToKeeper(msgspec.Struct, frozen=True, array_like=True):
    """A message to the gateway that keeps a budget."""

    message: BudgetMessage


class LoanTold(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a `LoanAsk`. `above`: the accounts above the one asked for, the nearest first."""

    lent: Lent
    rest_s: float | None  # None: no time was set
    above: tuple[str, ...]


class ResourceView(msgspec.Struct, frozen=True, array_like=True):
    """`reserved`: by what runs, below or at other gateways, and may still return."""

    limit: float
    used: float
    reserved: float
    left: float


class BudgetView(msgspec.Struct, frozen=True, array_like=True):
    """A budget as it stands; None: it doesn't bound that."""

    tokens: ResourceView | None
    branches: ResourceView | None
    wall_s: ResourceView | None


decode_to_keeper: Final = Decoder(ToKeeper, "a message about a budget")
decode_loan_told: Final = Decoder(LoanTold, "an answer about a loan")
decode_budget_view: Final = Decoder(BudgetView, "a budget")
