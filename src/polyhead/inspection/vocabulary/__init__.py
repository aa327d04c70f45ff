"""Labels and explanations of the columns, roles and relations of an inspection, in English and Chinese."""

from polyhead.analysis.languages import LANGUAGES, Language, Text
from polyhead.inspection.vocabulary.columns import COLUMNS, IMPORTANCE, column_of, score_column
from polyhead.inspection.vocabulary.relation_names import RELATIONS, relation_of
from polyhead.inspection.vocabulary.role_names import ROLE_ORDER, ROLES, role_of
from polyhead.inspection.vocabulary.terms import Column, Role, Term

__all__ = [
    "COLUMNS",
    "IMPORTANCE",
    "LANGUAGES",
    "RELATIONS",
    "ROLES",
    "ROLE_ORDER",
    "Column",
    "Language",
    "Role",
    "Term",
    "Text",
    "column_of",
    "relation_of",
    "role_of",
    "score_column",
]
