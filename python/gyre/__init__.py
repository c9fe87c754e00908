"""Gyre's inputs, references and tolerances for your own kernels, partitions and losses.

    problem = gyre.read("inputs/logprobs_golden.h5")
    mine = my_kernel(problem.inputs["logits"], problem.inputs["targets"])
    gyre.assert_close(mine, problem.reference["logprob"], rtol=1e-5)

write_* make inputs from arrays of NumPy or tensors, Tokenizer makes tokens of texts, gyre.reference
has the definitions in float64, read and read_results read files, compare and assert_close give the
verdict of gyre-compare.
"""

from . import reference
from .attention import attention_problem
from .comparison import assert_close, compare
from .digest import content_sha256
from .importance import Ratios, importance_ratios
from .logprobs import logprob_problem
from .reading import Damaged, File, Group, extras_of, read
from .results import read_results
from .tokenizer import Tokenizer
from .verdict import ArrayComparison, Comparison, Difference
from .version import __version__
from .writing import write_attention, write_documents, write_logprobs, write_rows, write_salm

__all__ = [
    "ArrayComparison",
    "Comparison",
    "Damaged",
    "Difference",
    "File",
    "Group",
    "Ratios",
    "Tokenizer",
    "__version__",
    "assert_close",
    "attention_problem",
    "compare",
    "content_sha256",
    "extras_of",
    "importance_ratios",
    "logprob_problem",
    "read",
    "read_results",
    "reference",
    "write_attention",
    "write_documents",
    "write_logprobs",
    "write_rows",
    "write_salm",
]
