import json
import os
import subprocess
import sys

import pytest

from conjoin.evaluation import hit_rate_at_k, mrr_at_k, recall_at_k

RANKED = [["a", "b", "c"], ["d", "e", "f"]]
RELEVANT = [["b", "c", "z"], ["x"]]

SCRIPT = """
import json, sys
from conjoin.evaluation import load_metric
ranked, relevant = json.loads(sys.argv[1])
names = ("hit_rate_at_k", "recall_at_k", "mrr_at_k")
found = [load_metric(name).compute(predictions=ranked, references=relevant, k=k) for name in names for k in (1, 2, 3)]
sys.stdout.write(json.dumps([[load_metric(name).name for name in names], *found]))
"""


@pytest.mark.slow
def test_shells_equal_the_functions_in_a_fresh_offline_process(tmp_path):
    pytest.importorskip("evaluate")
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-c", SCRIPT, json.dumps([RANKED, RELEVANT])]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    functions = (hit_rate_at_k, recall_at_k, mrr_at_k)
    expected = [{each.__name__: each(RANKED, RELEVANT, k)} for each in functions for k in (1, 2, 3)]
    assert json.loads(done.stdout) == [[each.__name__ for each in functions], *expected]
