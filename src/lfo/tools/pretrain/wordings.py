"""Wordings of generated worlds: how requests, records and refusals say what they say.

{v} a value, {a} what it is called, {n} any noun, {f} a few words that mean nothing here. Every fifth wording is held
out: no practice conversation uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

HELD_OUT = 5


def of(words: str) -> tuple[str, ...]:
    return tuple(words.split())


# Requests with one value. Those with {a} suit any value; the others suit names and codes, which show what they are.
LABELLED = (
    "Please {n} the {n} of {a} {v}.", "{A} {v} wants a {n}.", "It is about {a} {v}.", "The {a} is {v}.",
    "Would you mind looking at {a} {v}? {f}.", "{A}: {v}", "My {a} is {v}, and {f}.",
    "{f}, {a} {v}.", "We need the {n} for {a} {v} today.", "Reminder: {a} {v}, {n} and {n}.",
    "A {n} from {a} {v} {f}.", "Can you {n} {a} {v}?", "{A} {v} rang twice, {f}.", "Find {a} {v} and {n} it.",
    "The {n} with the {a} {v} is {n}.", "For {a} {v}, {f}, please.", "What about {a} {v}? {f}.",
    "I {n} the {a} {v} {f}.", "{a} = {v}", "Use {v} as the {a}.", "There is a {n} with {v} as its {a}.",
    "The {a} known as {v} {f}.", "Take the {a} \"{v}\" and {n} it.", "{n} a {n} for the {a} '{v}'.",
    "Somebody {f} and named the {a} {v}.", "Next on the list: {a} {v}, {f}.", "- {a}: {v}\n- {n}: {n}",
    "{A} of the {n}: {v}. {f}.", "{f}. {A} {v}.", "That is {a} {v}; {f}.",
)  # fmt: skip
BARE = (
    "{v} {f}.", "Please {n} {v}.", "{v}'s {n} {f}.", "From {v} to {n}: {f}.",
    "{f} with {v}. {f}!", "{f} {v} {f}.", "My name is {v}, {f}.",
    "Hello, this is {v}. My {n} {f}.", "{v} wants a {n}, {f}.", "I am {v} and {f}.", "For {v}: {n} {n}",
    "{v} called and {f}.", "It was {v} who {f}.", "A {n} named {v} {f}.", "{v}, {n}", "{n}: {v}", "Re: {v}, {n}",
    "{N} {v} {f}.", "{n} {v} {f}.", "Can you {n} the {n} for {v}?", "Who {f}? {v} did.", "{f} (see {v}).",
    "Yesterday {v} {f}; {f}.", "Dear all, {v} {f}. {f}.", "{f}, said {v}.", "You have {v} at the {n}. {f}.",
    "Task: {n} {v}", "Ask {v} {f}.", "{f} - {v} - {f}.", "{f}. {f}, {v}.",
)  # fmt: skip
# A mention without a sentence: something before, the value, something after.
BEFORE = ("", "{f} ", "{f}, ", "{n}: ", "{n} - ", "{f}. ", "({f}) ", "{f}? ", "{f}; ", "{N} ")
CORES = ("{a} {v}", "{a}: {v}", "{v} ({a})", "{a} is {v}", "{A} {v}", "{v} as {a}", '{a} "{v}"', "{v}, the {a},")
AFTER = ("", ".", ", {f}.", " {f}.", "? {f}.", ": {f}.", "; {f}.", " - {f}", "!", "'s {f}.", " ({f}).")
GREETINGS = (
    "Hi,", "Hello.", "Good morning!", "Dear colleague,", "Hey,", "Hello there,", "To whom it may concern:", "Morning.",
    "Good day.", "Dear team,",
)  # fmt: skip
TALK = (
    "Thank you.", "It is urgent.", "Take your time.", "There is one try only.", "You may try twice.", "Be careful.",
    "Thanks a lot!", "How does that sound?", "What do you think?", "I will be back at noon.", "Please hurry.",
    "Nobody else can do it.", "Call me later.", "Let me know when it is done.", "Best regards", "That is all I know.",
    "Is that possible?", "Sorry for the trouble.", "{f}.", "{f}?", "{f}. {f}.", "The {n} is {n}.", "My {n} {f}.",
    "Since {n} the {n} {f}.", "I need it by {n}.",
)  # fmt: skip
TITLES = ("Task:", "Request:", "Job:", "Subject: {n}\n", "{N}:", "Message:", "Note from the {n}:", "Ticket:", "#", ">")
SYSTEMS = (
    "You work at the {n}.", "You work in a {n}. {f}.", "You are the {n} of a {n}.", "You handle {n} and {n}.",
    "{N} desk. {f}.", "Help with the {n}. Look up what you need first.", "You are a helpful assistant.",
    "You {n} and {n} every day.", "Do the task with the tools.", "You are an agent of the {n} {n}.",
)  # fmt: skip

# What a look-up tells. {key} is what was looked up; {r} is a list of facts.
RECORDS = (
    "{key}: {r}.", "{r}", "{R} ({n} {key}).", "{key} has {r}.", "Found {key}: {r}.", "Record of {key}. {R}.", "{R}.",
    "{n} {key}, {r}.", "{R}. {f}.", "We know of {key}: {r}.",
)  # fmt: skip
FACTS = (
    "{a} {v}", "{a}: {v}", "{a} = {v}", "the {a} is {v}", "the {v} {a}", "{a} is {v}", "{v} as {a}", "{a} - {v}",
    "a {a} of {v}", "{a} ({v})",
)  # fmt: skip
JOINTS = (", ", "; ", " and ", ". ", "\n", ", ", ", and ", " | ", ", ", " / ")

# What a refusal names: {v} is needed for {a}, {g} was given, {s} is what the task is about.
NEEDED = (
    "{a} must be {v}", "it needed {v}", "wanted {v}", "use {v} instead of {g}", "{a} should be {v}",
    "only {v} is accepted", "{g} is wrong, {v} is right", "{s} requires {a} {v}", "the {a} has to be {v}",
    "the right {a} is {v}", "use {v}, not {g}", "{v} was needed here", "{s} and {v} go together", "{a}: {v} required",
    "it had to be {v}", "{s} needs {v}", "the answer was {v}", "try {v}", "{s} takes {a} {v}", "with {v} it works",
    "set {a} to {v}", "{v} would have worked", "{s} goes to {v}", "{a}={v} expected", "for {s} {v}",
    "got {g}, wanted {v}", "should have been {v}", "{a} {g} does not fit, {v} does", "{s} belongs to {v}",
    "we only take {v} for {s}", "missing {v}", "correct is {v}", "{s} asks for {a} {v}", "{f} {v}", "{v}, {f}",
    "not {g} but {v}", "the {a} was {v}", "you need {v}", "{v} is the only {a} for {s}", "{v} alone would have done",
)  # fmt: skip
BOTH = (
    "{s} needs {r}", "it takes {r}", "use {r}", "wanted: {r}", "{r} would be right", "{s} is done with {r}", "try {r}",
    "the {n} says {r}", "{s}: {r}", "give {r} instead",
)  # fmt: skip
FAILED = (
    "Refused", "Error", "Denied", "Failed", "No", "Rejected", "Wrong", "Not accepted", "Sorry", "That was not right",
    "Not possible", "Declined", "Invalid", "Nothing happens", "The {n} is lost", "Stopped", "Wrong {a}", "{f}",
    "Bad {n}", "Not allowed", "No luck", "Too late", "No {n}", "The {n} {f}", "{N}",
)  # fmt: skip
DONE = (
    "Done.", "Accepted.", "Success.", "OK.", "The {n} is done.", "That worked.", "Approved.", "{N} done. {f}.",
    '{{"ok": true}}', "Confirmed.", "All good.", "Right.", "The {n} is {n}.", "{f}: done.", "Thank you, {f}.",
)  # fmt: skip
DESCRIPTIONS = (
    "", "", "{N} the {n}.", "{N} a {n}; returns {n} and {n}.", "{N} the {n} of a {n}.", "{N} {n}. There is one try.",
    "{f}.", "Tells the {n} of a {n}.", "{N} it once; {f}.", "{N}",
)  # fmt: skip
ARGUMENTS = (
    "",
    "",
    "which {n}",
    "the {n} of the {n}",
    "{n} {n}",
    "{a} of the {n}",
    "the {a}",
    "{f}",
    "what to {n}",
    "{a}",
)

FILLER = of(
    "the a of to and in is it for with that was on not my be has at by this are from as but have an will or had can "
    "you one we all there no more when what out up if about so who get which me then new some could time your how now "
    "only her his their they i he she been would does after before since again because just also still please"
)


def wordings(every: Sequence[str], held_out: bool) -> list[str]:
    """Return the wordings of practice, or those that it never uses."""
    return [each for index, each in enumerate(every) if (index % HELD_OUT == HELD_OUT - 1) == held_out]
