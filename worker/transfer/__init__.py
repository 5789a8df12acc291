"""Copies of KV blocks between device, host memory, disk and other workers, and books of what lies below.

A `Transfer` (`values`) names the blocks of two places: the device, host memory, disk or, as a source, a loan
of a peer; a file that is imported is such a loan too. A `Mover` has a `Carrier` copy them (`movers`), in
threads beside the steps or at once, and gives back one outcome: `Moved`, maybe with the error that ended it.
What has failed leaves both places as they were. Beside decodes a `Pace` bounds the bandwidth.

`LowerTiers` (`lower`) keeps the books of host memory (`host`) and disk (`disk`). Evictions, parked and
restored capsules, records on disk and fetches for prompts are transfers between other places, and take one
way: `_start` holds the slots at both ends and begins, `_end` takes the outcome in, publishes it, and lets go.
It also says whether a fetch is worth its time (`prices`).

`Loans` (`loans`) is the other end of pulls: blocks that peers read are held for them meanwhile.

The rule by which a branch waits for a transfer is the scheduler's (`sched.fetching`). Here blocks are known
by key, and nothing is known of the texts, branches and requests that they belong to. Free of torch.
"""
