"""How the embedded base came to be: `lfo pretrain` builds the tokenizer and the model from a corpus of practice.

corpus.py      practice conversations in worlds without a law
tokenizer.py   the small BPE tokenizer and its chat template
recipe.py      the model's shape, its training, and the check of what it can and cannot do
"""
