"""The pronoun sentences cannot be solved by the position, length or identity of a name."""

from __future__ import annotations

from collections import Counter

import pytest

from polyhead.sources.pronoun_sentences import pronoun_sentences

PRONOUNS = {"en": {"she", "he", "it", "they"}, "zh": {"她", "他", "它", "他们"}}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_there_are_eighty_and_their_places_hold_what_they_say(language):
    sentences = pronoun_sentences(language)
    assert len(sentences) == 80
    assert len({sentence.text for sentence in sentences}) == 80
    assert Counter(sentence.cue for sentence in sentences) == {"gender": 24, "number": 16, "meaning": 40}
    for sentence in sentences:
        assert sentence.language == language
        assert sentence.text[slice(*sentence.pronoun)] in PRONOUNS[language]
        assert sentence.antecedent[1] <= sentence.pronoun[0], "a causal model has seen it"
        assert sentence.distractor[1] <= sentence.pronoun[0]
        names = {sentence.text[slice(*span)] for span in (sentence.antecedent, sentence.distractor)}
        assert len(names) == 2
        assert all(name.strip() == name and name for name in names)
        assert not set("{}<>[]|") & set(sentence.text)
    # The pronoun fits both names where only the meaning decides, and one of them elsewhere.
    pronouns = {x.frame: set() for x in sentences}
    for x in sentences:
        pronouns[x.frame].add(x.text[slice(*x.pronoun)])
    assert all(len(pronouns[x.frame]) == (1 if x.cue == "meaning" else 2) for x in sentences)


def test_all_are_those_of_both_languages():
    assert pronoun_sentences() == pronoun_sentences("en") + pronoun_sentences("zh")


@pytest.mark.parametrize(
    "prefers",
    [
        lambda sentence: sentence.antecedent < sentence.distractor,  # the first name
        lambda sentence: sentence.antecedent > sentence.distractor,  # the last
        lambda sentence: name(sentence, sentence.antecedent) < name(sentence, sentence.distractor),  # a certain one
        lambda sentence: len(name(sentence, sentence.antecedent)) > len(name(sentence, sentence.distractor)),
    ],
)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_nothing_but_the_meaning_tells_which_is_meant(language, prefers):
    of_equal_length = Counter()
    right: Counter[int] = Counter()
    for sentence in pronoun_sentences(language):
        right[sentence.frame] += prefers(sentence)
        lengths = {len(name(sentence, span)) for span in (sentence.antecedent, sentence.distractor)}
        of_equal_length[sentence.frame] += len(lengths) == 1
    assert len(right) == 20
    for frame, count in right.items():
        assert count == 2 or (count == 0 and of_equal_length[frame] == 4), frame


def name(sentence, span) -> str:
    return sentence.text[slice(*span)].lower()
