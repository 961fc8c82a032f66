"""People as oracles: what they are asked and answer, and the page on which they do so.

`python -m pbcrl.label FOLDER` opens the page of a label folder. `store` keeps questions and
answers, `agreement` and `export` tell how far people agree, `replay` and `clips` draw what they
see, `server` serves the page, `terminal` is for those who have no browser. Does not depend on cost
models or training.
"""
