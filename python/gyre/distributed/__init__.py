"""Other people's distributed code, held against the float64 answers of the golden suite.

    python -m gyre conform inputs/golden --function my_file.py:attention --ranks 2

starts two ranks, gives each its shard of every case, and says which contract the function breaks:
wrong pairs, a wrong scale, a factor cp, a shifted row, a dropped shard, a key of another document.
Contracts are the modules named in contracts.NAMES.
"""

from .conform import Options, Report, Unable, Usage, conform
from .contract import Finding, Verdict
from .group import Group
from .layouts import Layout, layout_of

__all__ = ["Finding", "Group", "Layout", "Options", "Report", "Unable", "Usage", "Verdict", "conform", "layout_of"]
