"""`lfo pretrain`: build the embedded base, its tokenizer and its model, from practice conversations.

corpus.py      practice conversations in worlds without a law
tokenizer.py   the small BPE tokenizer and its chat template
recipe.py      the shape of the model and its training
check.py       the check of what a base can do and does not know
syntax.py      training of the call syntax of any environment
general.py     the base from which that starts, trained on the generated worlds of any_world.py
"""
