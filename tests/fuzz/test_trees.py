"""The random sequences of tests/batches_trees.py: draft trees and kept paths, on both implementations."""

from batches_trees import NumbaTreeBatches, TreeBatches
from fuzz.budget import examples

TestTreeBatches = TreeBatches.TestCase
TestTreeBatches.settings = examples(40, steps=60)
TestNumbaTreeBatches = NumbaTreeBatches.TestCase
TestNumbaTreeBatches.settings = examples(15, steps=60)
