"""lm-eval, local-completions: a task of our own over a local file; prints likelihoods as JSON.

The task is multiple choice: of each choice the log-likelihood after its question, and whether it is
what greedy decoding would write.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

URL, MODEL, KEY, TOKENIZER, DATA = sys.argv[1:]
TASK = f"""\
task: glossary
dataset_path: json
dataset_kwargs: {{data_files: {{test: {DATA}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: label
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""

os.environ["OPENAI_API_KEY"] = KEY
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "glossary.yaml").write_text(TASK)
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{URL}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": TOKENIZER,
            "num_concurrent": 4,
            "max_retries": 1,
        },
        tasks=["glossary"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
samples = sorted(results["samples"]["glossary"], key=lambda sample: sample["doc_id"])
print(json.dumps([[list(response[0]) for response in sample["resps"]] for sample in samples]))
