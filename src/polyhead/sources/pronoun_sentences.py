"""Pronoun resolution probes: sentences with a pronoun, its antecedent and a distractor.

Every template yields four sentences: both orders of its two names, with both cues (the pronoun itself, or words before
it) that select the antecedent. Position is therefore uninformative: a head that always prefers the first, the last or
the longer name is correct in exactly half of them. The cue precedes or is the pronoun, so that causal models see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Language = Literal["en", "zh"]
Cue = Literal["gender", "number", "meaning"]  # by which the antecedent is known
Span = tuple[int, int]  # the first character and one past the last


@dataclass(frozen=True, slots=True)
class PronounSentence:
    """A text with the character spans of its pronoun, antecedent and distractor."""

    text: str
    language: Language
    frame: int  # index of the template, shared by four sentences
    cue: Cue
    pronoun: Span
    antecedent: Span
    distractor: Span


@dataclass(frozen=True, slots=True)
class _Frame:
    """Template: `{0}` and `{1}` are the names in either order; in `<she|he>`, "she" refers to the first of `names`.

    With a pronoun that fits both, `<it>`, earlier words such as `[dirty|clean]` select the antecedent, and the first
    choice refers to the name in the first position: only their meaning helps.
    """

    text: str
    names: tuple[str, str]
    cue: Cue


def _opposites(first: str, second: str, reaction: str, *names: str) -> _Frame:
    text = f"{{0}} was [{first}|{second}] and {{1}} was [{second}|{first}], so {reaction}."
    return _Frame(text, (names[0], names[1]), "meaning")


_ENGLISH = (
    _Frame("{0} met {1} at the station, and <she|he> looked tired.", ("Anna", "Peter"), "gender"),
    _Frame("{0} asked {1} for help because <she|he> had lost the key.", ("Mary", "John"), "gender"),
    _Frame("After {0} had called {1}, <she|he> went back to work.", ("Laura", "Robert"), "gender"),
    _Frame("{0} danced with {1} until <she|he> wanted to rest.", ("Sarah", "David"), "gender"),
    _Frame("When {0} saw {1} in the garden, <she|he> began to laugh.", ("my mother", "my father"), "gender"),
    _Frame("{0} told {1} that <she|he> would never be alone again.", ("the queen", "the king"), "gender"),
    _Frame(
        "{0} followed {1} across the field until <it|they> stopped at the river.", ("the dog", "the children"), "number"
    ),
    _Frame("{0} stood behind {1} for years before <it|they> had to be sold.", ("the piano", "the chairs"), "number"),
    _Frame("{0} passed {1} on the road before <it|they> turned left.", ("the bus", "the cyclists"), "number"),
    _Frame("{0} was parked beside {1} until <it|they> had to be moved.", ("the van", "the bikes"), "number"),
    _opposites("dirty", "clean", "we washed <it>", "the bowl", "the box"),
    _opposites("broken", "new", "they repaired <it>", "the truck", "the bus"),
    _opposites("heavy", "light", "two men carried <it>", "the table", "the lamp"),
    _opposites("empty", "full", "we filled <it>", "the bottle", "the jar"),
    _opposites("hungry", "asleep", "we fed <it>", "the cat", "the horse"),
    _opposites("cold", "hot", "we warmed <it>", "the soup", "the tea"),
    _opposites("wet", "dry", "we hung <it> in the sun", "the towel", "the shirt"),
    _opposites("open", "locked", "the guard shut <it>", "the gate", "the window"),
    _opposites("ill", "healthy", "the vet treated <it>", "the goat", "the sheep"),
    _opposites("dark", "bright", "we lit <it> with a candle", "the hall", "the kitchen"),
)
_CHINESE = (
    _Frame("{0}在车站遇见了{1}，<她|他>看起来很累。", ("王丽", "李强"), "gender"),
    _Frame("{0}请{1}帮忙，因为<她|他>把钥匙弄丢了。", ("小红", "小刚"), "gender"),
    _Frame("{0}给{1}打完电话以后，<她|他>又回去上班了。", ("陈静", "赵军"), "gender"),
    _Frame("{0}和{1}一起跳舞，后来<她|他>想休息一下。", ("姐姐", "弟弟"), "gender"),
    _Frame("{0}在花园里看到{1}的时候，<她|他>笑了起来。", ("妈妈", "爸爸"), "gender"),
    _Frame("{0}告诉{1}，<她|他>再也不会孤单了。", ("王后", "国王"), "gender"),
    _Frame("{0}跟着{1}穿过田野，直到<它|他们>在河边停下来。", ("小狗", "孩子们"), "number"),
    _Frame("{0}在{1}旁边等了很久，最后<它|他们>先走了。", ("那只猫", "客人们"), "number"),
    _Frame("{0}在路上超过了{1}，然后<它|他们>向左转了。", ("那辆公交车", "骑车的人们"), "number"),
    _Frame("{0}陪着{1}坐在门口，后来<它|他们>睡着了。", ("小猫", "老人们"), "number"),
    _Frame("{0}是[脏|干净]的，{1}是[干净|脏]的，所以我们洗了<它>。", ("这个碗", "这个盒子"), "meaning"),
    _Frame("{0}是[坏|新]的，{1}是[新|坏]的，所以他们修好了<它>。", ("那辆卡车", "那辆公共汽车"), "meaning"),
    _Frame("{0}很[重|轻]，{1}很[轻|重]，所以两个人一起抬<它>。", ("这张桌子", "这盏台灯"), "meaning"),
    _Frame("{0}是[空|满]的，{1}是[满|空]的，所以我们往<它>里面倒了水。", ("这个瓶子", "这个杯子"), "meaning"),
    _Frame("{0}[饿|饱]了，{1}[饱|饿]了，所以我们喂了<它>。", ("小猫", "小马"), "meaning"),
    _Frame("{0}是[凉|热]的，{1}是[热|凉]的，所以我们把<它>放回了炉子上。", ("这锅汤", "这锅粥"), "meaning"),
    _Frame("{0}是[湿|干]的，{1}是[干|湿]的，所以我们把<它>晒在太阳下。", ("这条毛巾", "这件衬衫"), "meaning"),
    _Frame("{0}[开|锁]着，{1}[锁|开]着，所以保安关上了<它>。", ("大门", "窗户"), "meaning"),
    _Frame("{0}[病了|很健康]，{1}[很健康|病了]，所以兽医给<它>打了针。", ("那只狗", "那只羊"), "meaning"),
    _Frame("{0}是[旧|新]的，{1}是[新|旧]的，所以我们换掉了<它>。", ("这台电脑", "这台电视"), "meaning"),
)


def pronoun_sentences(language: Language | None = None) -> tuple[PronounSentence, ...]:
    """Return all sentences, 80 per language, or those of one language.

    >>> [sentence.text for sentence in pronoun_sentences("en")[:2]]
    ['Anna met Peter at the station, and she looked tired.', 'Anna met Peter at the station, and he looked tired.']
    """
    frames: list[tuple[Language, _Frame]] = [
        *(("en", frame) for frame in _ENGLISH),
        *(("zh", frame) for frame in _CHINESE),
    ]
    return tuple(
        sentence
        for number, (frame_language, frame) in enumerate(frames)
        if language in (None, frame_language)
        for sentence in _sentences(frame, frame_language, number)
    )


def _sentences(frame: _Frame, language: Language, number: int) -> Iterator[PronounSentence]:
    for swapped in (False, True):
        for cue in (0, 1):
            # The first cue selects the first of `names`, or the name in the first position.
            antecedent = cue if frame.cue == "meaning" or not swapped else 1 - cue
            text, pronoun, spans = _fill(frame.text, frame.names[::-1] if swapped else frame.names, cue)
            yield PronounSentence(text, language, number, frame.cue, pronoun, spans[antecedent], spans[1 - antecedent])


def _fill(frame: str, names: tuple[str, str], cue: int) -> tuple[str, Span, list[Span]]:
    """Return the text of a template, the span of its pronoun and the spans of its names."""
    text = ""
    pronoun = (0, 0)
    spans: list[Span] = []
    rest = frame
    closing = {"{": "}", "<": ">", "[": "]"}
    while rest:
        opened = min((index for index in map(rest.find, closing) if index >= 0), default=len(rest))
        text += rest[:opened]
        if opened == len(rest):
            break
        mark = rest[opened]
        inside, _, rest = rest[opened + 1 :].partition(closing[mark])
        choices = inside.split("|")
        word = names[int(inside)] if mark == "{" else choices[min(cue, len(choices) - 1)]
        span = (len(text), len(text) + len(word))
        text += word
        if mark == "{":
            spans.append(span)
        elif mark == "<":
            pronoun = span
    return text[0].upper() + text[1:], pronoun, spans
