"""Test every sentence of a report against materialised attention: `python -m benchmarks statements --help`.

A model is inspected as `polyhead inspect --html` does, and every sentence that the terminal and the page print about it
is listed. Each is parsed, and its numbers are recomputed in plain torch from the attention weights that the model
returns (`attn_implementation="eager"`, `output_attentions=True`), by the definitions in the documentation. Of polyhead
only the sentences, the models and the token ids are used. A sentence passes if its numbers agree to the last printed
digit and what it claims follows from the recomputed numbers, e.g. that a score is above its null. A sentence that no
check recognises is reported as not checked, and counts as failed.
"""
