"""Language models whose heads are known, because each was built by hand: the truth an inspection is measured against.

**The stream.** A random orthogonal basis of the residual stream is cut into five subspaces: *position* (one axis for
each place), *token* (a random unit vector for each word), *previous* (scratch, where the token before is noted),
*output* (what the unembedding reads) and *spare* (what nothing reads). Token and position are written by the
embeddings and by nothing else, so every head of every layer finds them as they were.

**The heads.** A head is written down as two circuits in these coordinates: a bilinear form that gives the logit of
each query and key, and a map from the attended token to what is written. Both are taken apart into W_Q, W_K and
W_V, W_O by a singular value decomposition, and a random rotation is put between the factors, which no output can
see. No channel and no axis of the stream is then special; what stays visible in the weights is the rank of a circuit,
which is the head's own (a sink's logits have rank one).

**What a head does**, by the name it is planted under (`PLANTED_ROLES` says which roles follow):

| name | logit | writes |
|---|---|---|
| previous, self, next, long-range | `gap` at one offset, 0 elsewhere | previous: the token, into scratch |
| sink | `gap` at the first place | |
| broad | next to nothing | |
| local | a Gaussian window, floor at -`gap`, and random content | |
| duplicate-token | match of token and token, less at the query itself | |
| induction | match of token and the token noted before the key | the token's unembedding |
| copy, anti-copy | random content | the token's unembedding, or minus that |

Where nothing is said, a head writes a random half of the token's vector into spare; those that copy write a random half
of its unembedding, so that no two heads write into the same subspace unless they were planted to. An offset before the
first place means the first place; the last query has no next key, and looks everywhere. Matching heads give an equal
token 4 `gap`, the first place 3 `gap` to rest on, and any other token at most 2 `gap`, since no two words are closer
than a cosine of one half. So texts start with `BEGIN`, a token that resembles no word. On text with few repetitions
they rest most of the time, as trained ones do.

**Duplicates** are one pair of random content heads inside a layer and one pair across two layers: the same circuits,
each time behind rotations of its own. The remaining heads are Gaussian matrices. Which layer and which index a head
gets is drawn as well; the note of the previous token only has to stand in a layer before the induction head.

Blocks have their RMS norm and their residuals; the feed-forward network adds nothing. The norm divides by the length
of the stream, which is measured on random text while the model is built, layer by layer, so that `gap` is the gap
at the average length. Heads write little (`write`), so that single tokens differ from it by less than one per cent,
and a duplicate in a later layer is as good as one beside its twin.
"""

from __future__ import annotations

from tests.planted.circuits import PLANTED_ROLES, Sharpness
from tests.planted.model import Planted, planted_model, random_model
from tests.planted.spaces import Sizes
from tests.planted.texts import BEGIN, random_tokens, repeated_tokens

__all__ = [
    "BEGIN",
    "PLANTED_ROLES",
    "Planted",
    "Sharpness",
    "Sizes",
    "planted_model",
    "random_model",
    "random_tokens",
    "repeated_tokens",
]
