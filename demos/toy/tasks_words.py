"""Word lists shared by the task generators of the toy pair."""

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    """Split a list of words at its spaces."""
    return tuple(text.split())


FIRST_NAMES: Final = _words(
    "Ada Ben Clara David Elena Felix Greta Hugo Ines Jonas Karin Leo Mara Nils Olga Paul Rosa Sam Tara Viktor "
    "Anna Boris Carla Dario Emma Frank Gina Henry Ida Jack Lena Marco Nora Oskar Petra Ravi Sofia Tom Wanda Yuri"
)

LAST_NAMES: Final = _words(
    "Adams Baker Costa Diaz Evans Fischer Garcia Hansen Ivanov Jensen Keller Lopez Meyer Novak Olsen "
    "Peters Quinn Rossi Silva Turner Urban Vega Weber Young Zimmer Bauer Clark Duarte Engel Ford"
)

MONTHS: Final = _words(
    "January February March April May June July August September October November December"
)

WEEKDAYS: Final = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

COUNTRIES: Final = {
    "AT": "Austria", "BE": "Belgium", "BR": "Brazil", "CA": "Canada", "CH": "Switzerland", "CL": "Chile",
    "DE": "Germany", "DK": "Denmark", "EG": "Egypt", "ES": "Spain", "FI": "Finland", "FR": "France",
    "GR": "Greece", "IE": "Ireland", "IN": "India", "IS": "Iceland", "IT": "Italy", "JP": "Japan",
    "KE": "Kenya", "MX": "Mexico", "NO": "Norway", "PE": "Peru", "PL": "Poland", "PT": "Portugal",
}  # fmt: skip

NUMBER_WORDS: Final = _words("zero one two three four five six seven eight nine ten eleven twelve")

NAME_PARTS: Final = _words(
    "alpha amber basic blue bright clean cool data delta early fast final first fresh gold good grand green hidden "
    "inner item large last light list main mixed next north open plain prime quick raw red round safe second shared "
    "short silver simple small smart solid south spare steady sub super test thin top total tiny true upper user "
    "value warm wide work"
)
