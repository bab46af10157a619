"""Small talk with replies that follow from the prompt by a fixed rule, in wording that the prompt does not contain."""

import random
from collections.abc import Callable
from typing import Final

from tasks_base import Draw, Message, assistant, same_text, user
from tasks_words import FIRST_NAMES, MONTHS, WEEKDAYS

_CITIES: Final = {
    "Lisbon": (
        "Alfama is full of steep lanes",
        "try a warm custard tart",
        "the yellow trams climb every hill",
    ),
    "Vienna": (
        "the old palaces shine at dusk",
        "order a slice of chocolate cake",
        "the ring line circles the centre",
    ),
    "Oslo": (
        "the opera roof invites a walk",
        "taste smoked salmon on dark bread",
        "ferries leave for the fjord",
    ),
    "Kyoto": (
        "wooden temples hide in the woods",
        "sip green tea with a sweet bean cake",
        "buses reach all shrines",
    ),
    "Rome": (
        "ancient arches stand at each corner",
        "eat thin pizza by the slice",
        "most sights are a stroll apart",
    ),
    "Dublin": (
        "the long library hall is a wonder",
        "have a bowl of lamb stew",
        "green double deckers go everywhere",
    ),
    "Cairo": (
        "the pyramids glow in the early light",
        "share lentils with rice",
        "river boats are slow but lovely",
    ),
    "Lima": (
        "cliffs look over the grey ocean",
        "pick raw fish with lime",
        "a single fast lane carries the express bus",
    ),
    "Prague": (
        "the stone bridge is best at dawn",
        "get dumplings with gravy",
        "trams run through the whole night",
    ),
    "Boston": (
        "a red brick path links old houses",
        "sample creamy clam soup",
        "the oldest subway of its land still runs",
    ),
    "Athens": (
        "marble columns crown the hill",
        "grab grilled skewers in flat bread",
        "the metro shows digs at its stops",
    ),
    "Bergen": (
        "painted houses line the harbour",
        "warm up with fish soup",
        "a small cable train goes up the mountain",
    ),
    "Madrid": (
        "great paintings fill three museums",
        "dip fried dough in cocoa",
        "the underground is quick and cheap",
    ),
    "Nairobi": (
        "giraffes graze close to the towers",
        "enjoy roast meat with maize",
        "shared vans fill the avenues",
    ),
    "Quebec": (
        "thick walls surround the upper town",
        "dare fries with cheese and sauce",
        "a lift joins both levels",
    ),
    "Jaipur": (
        "rosy facades catch the sun",
        "order spicy curry with soft bread",
        "three wheelers wait at every gate",
    ),
}
_SEASONS: Final = (
    ("It will be cold then, so pack a thick coat and gloves.", (12, 1, 2)),
    ("Showers are common at that time, so carry a light raincoat.", (3, 4, 5)),
    ("Expect heat, so bring a hat and drink plenty of water.", (6, 7, 8)),
    ("Evenings get cool by then, so a warm sweater will help.", (9, 10, 11)),
)
_COMPANIONS: Final = {
    "my brother": "As a pair you can split a room and save some money.",
    "my parents": "Plan long breaks, because nobody likes to rush on holiday.",
    "my kids": "Look for playgrounds on the way and keep the days short.",
    "my wife": "A quiet dinner by candle light would be a nice surprise.",
    "my dog": "Ask the hotel first whether animals may stay there.",
    "nobody else": "On your own you are free to change plans at any moment.",
    "two friends": "With three of you a rented flat is the better deal.",
}
_INTERESTS: Final = {
    "art": "Book the big galleries online to skip the queue",
    "food": "Visit the market halls before noon when everything is fresh",
    "music": "Check the small clubs, since many concerts there cost nothing",
    "nature": "Leave one day for a hike outside the centre",
    "history": "Join a guided walk that starts at the town hall",
    "sport": "Rent a bicycle and follow the path along the water",
    "photos": "Get up early, because soft light makes the best pictures",
}

_DISHES: Final = {
    "pancakes": ("flour, milk, eggs and a pinch of salt", "whisk them to a smooth batter and let it rest",
                 "fry thin rounds in butter until both sides are golden", "maple syrup"),
    "tomato soup": ("ripe tomatoes, an onion, garlic and stock", "soften the onion and add everything else",
                    "simmer it for a while and blend it well", "fresh basil"),
    "an omelette": ("eggs, cheese and a few herbs", "beat the eggs with a fork and season them",
                    "cook gently in a hot pan and fold it once", "a slice of toast"),
    "risotto": ("round rice, broth, wine and parmesan", "toast the rice and pour in the wine",
                "stir in the hot broth ladle by ladle", "grated cheese"),
    "a fruit salad": ("apples, oranges, grapes and a banana", "wash and cut them into small cubes",
                      "mix them with lemon juice and chill the bowl", "whipped cream"),
    "chili": ("beans, peppers, minced beef and spices", "brown the meat and stir in the peppers",
              "add the beans and let the pot bubble slowly", "sour cream"),
    "bread": ("strong flour, yeast, water and salt", "knead a firm dough and leave it to rise",
              "bake the loaf in a very hot oven", "salted butter"),
    "noodle soup": ("egg noodles, ginger, broth and spring onions", "heat the broth with the ginger",
                    "boil the noodles in it and top it with the onions", "a soft egg"),
}  # fmt: skip
_GUESTS: Final = {
    "two": "A small pan is enough for that.",
    "four": "Use a medium pot and you will have no leftovers.",
    "six": "Take your largest pot and double the seasoning.",
    "ten": "Work in several batches, since no pan holds that much.",
}
_DIETS: Final = {
    "vegan": "Swap all animal products for plant versions, oat based ones do well.",
    "allergic to nuts": "Read each label with care, traces hide in many packets.",
    "on a low salt plan": "Let lemon and pepper do the work of salt.",
    "very hungry": "Put some olives on the table to bridge the wait.",
    "fond of hot food": "Offer chopped red pepper on the side.",
}

_HOBBIES: Final = {
    "the guitar": (
        "Tune it every time",
        "three easy chords carry hundreds of songs",
        "sore fingertips are normal at first",
    ),
    "chess": (
        "Solve a few puzzles daily",
        "control of the centre wins many games",
        "each lost game shows a weak spot",
    ),
    "painting": (
        "Start with cheap brushes",
        "two colours and white teach you about shade",
        "nothing has to look perfect",
    ),
    "swimming": (
        "Take one lesson for the breathing",
        "slow laps build a good stroke",
        "tired arms mean real progress",
    ),
    "knitting": (
        "Choose thick wool",
        "a plain scarf is a fine first piece",
        "dropped stitches can always be rescued",
    ),
    "Spanish": (
        "Label things in your kitchen",
        "short stories with audio train the ear",
        "mistakes are how we improve",
    ),
    "running": (
        "Buy decent shoes first",
        "an easy pace should let you talk",
        "rest between outings keeps knees healthy",
    ),
    "gardening": (
        "Begin with herbs in pots",
        "good soil does most of the job",
        "every plant that dies is a lesson",
    ),
}
_TIMES: Final = {
    "ten minutes a day": "Even a tiny slot works if you never skip it.",
    "one hour a day": "Divide that hour in two halves with a short pause.",
    "only weekends": "Fix a morning for it so nothing else gets in between.",
    "every evening": "Stop while it is still fun and sleep on what you tried.",
}
_WORRIES: Final = {
    "I am too old": "Age matters far less than patience.",
    "I have no talent": "Talent is mostly practice that nobody saw.",
    "I give up quickly": "Tell a friend about your goal, because that keeps you honest.",
    "it costs too much": "Borrow or buy used gear before spending more.",
    "my family will laugh": "Let them laugh, soon they will ask for a show.",
}

_MOODS: Final = {
    "tired": ("That sounds exhausting.", "Go to bed early and leave the phone in another room."),
    "happy": (
        "That is wonderful to hear!",
        "Write down what made it good so that you can repeat it.",
    ),
    "nervous": (
        "I understand that feeling well.",
        "Breathe out slowly ten times and sort your notes once more.",
    ),
    "bored": ("Quiet stretches can be hard.", "Pick one small thing that you have never tried."),
    "angry": ("That must have been annoying.", "Take a brisk walk before you answer anybody."),
    "lonely": (
        "Thank you for telling me.",
        "Call someone you trust, even if it is only for a minute.",
    ),
}
_EVENTS: Final = {
    "an exam": ("Revise the hardest chapter first", "a calm breakfast helps the memory"),
    "a job interview": ("Prepare two questions of your own", "polished shoes do no harm"),
    "a wedding": ("Check the address of the church", "keep tissues in your pocket"),
    "a long flight": ("Download some films", "choose a seat near the aisle"),
    "a visit to the dentist": ("Ask for a break sign", "loud music in your ears is a relief"),
    "a football match": ("Stretch your legs well", "team spirit beats single stars"),
    "a move": ("Mark all boxes clearly", "treat your helpers to some food"),
}

_GREETINGS: Final = ("Hi", "Hello", "Good morning", "Hey there", "Good evening")
_BACK: Final = {
    "Hi": "Hi, nice to meet you!", "Hello": "Welcome, what a pleasure!", "Good morning": "A lovely morning to you!",
    "Hey there": "Hey, good to see you!", "Good evening": "A pleasant evening to you!",
}  # fmt: skip


def _pick(rng: random.Random, table: dict) -> str:
    """Draw a key of a table."""
    return rng.choice(tuple(table))


def _opening(rng: random.Random) -> tuple[str, str]:
    """Draw a greeting with a name and return it with the start of the reply."""
    greeting, name = rng.choice(_GREETINGS), rng.choice(FIRST_NAMES)
    who = rng.choice(("I am {}", "my name is {}", "this is {}")).format(name)
    return f"{greeting}, {who}.", _BACK[greeting]


def _travel(rng: random.Random) -> list[Message]:
    """Draw a talk about a journey, sometimes with a second question about the city."""
    opening, reply = _opening(rng)
    city, month = _pick(rng, _CITIES), rng.randint(1, 12)
    companion, interest = _pick(rng, _COMPANIONS), _pick(rng, _INTERESTS)
    sight, dish, transport = _CITIES[city]
    season = next(text for text, months in _SEASONS if month in months)
    request = rng.choice(
        (
            "I travel to {city} in {month} with {companion} and I like {interest}. Any tips?",
            "In {month} I will see {city} with {companion}. My passion is {interest}. What do you suggest?",
            "What should I know about {city} in {month}? I come with {companion} and love {interest}.",
        )
    ).format(city=city, month=MONTHS[month - 1], companion=companion, interest=interest)
    answer = (
        f"{reply} {city} is a great choice: {sight}. {season} {_COMPANIONS[companion]} "
        f"{_INTERESTS[interest]}, and afterwards {dish}. Have a safe journey!"
    )
    turns = [user(f"{opening} {request}"), assistant(answer)]
    if rng.random() < 0.35:
        turns += [
            user(
                rng.choice(
                    ("Thanks! How do I get around?", "Nice. And how do people move about there?")
                )
            ),
            assistant(
                f"Moving about in {city} is simple: {transport}. Buy a pass for several days at the first station, "
                f"it soon pays for itself. {season} If your feet hurt, sit down in a cafe and {dish}."
            ),
        ]
    return turns


def _cooking(rng: random.Random) -> list[Message]:
    """Draw a talk about a meal, sometimes with a second question about the drinks and the day."""
    opening, reply = _opening(rng)
    dish, guests, diet, day = (
        _pick(rng, _DISHES),
        _pick(rng, _GUESTS),
        _pick(rng, _DIETS),
        rng.choice(WEEKDAYS),
    )
    things, first, second, topping = _DISHES[dish]
    request = rng.choice(
        (
            "How do I make {dish} for {guests} people on {day}? One guest is {diet}.",
            "On {day} there will be {guests} of us and I want to cook {dish}. Somebody is {diet}.",
            "Explain {dish} to me, please. We are {guests} on {day} and one person is {diet}.",
        )
    ).format(dish=dish, guests=guests, diet=diet, day=day)
    answer = (
        f"{reply} You need {things}. First {first}. Then {second}, and serve with {topping}. "
        f"{_GUESTS[guests]} {_DIETS[diet]} Enjoy your meal!"
    )
    turns = [user(f"{opening} {request}"), assistant(answer)]
    if rng.random() < 0.35:
        turns += [
            user(rng.choice(("Great. When should I shop?", "Thank you! What can I do ahead?"))),
            assistant(
                f"Go shopping the day before, so that all is fresh and you stay relaxed. Put {things} on your list, "
                f"and do not forget {topping}. An hour before the guests ring, lay the table and {first}."
            ),
        ]
    return turns


def _hobby(rng: random.Random) -> list[Message]:
    """Draw a talk about something to learn."""
    opening, reply = _opening(rng)
    hobby, time, worry = _pick(rng, _HOBBIES), _pick(rng, _TIMES), _pick(rng, _WORRIES)
    first, second, third = _HOBBIES[hobby]
    request = rng.choice(
        (
            "I want to learn {hobby} and have {time}, but {worry}.",
            "Can I still take up {hobby}? My time is {time}. I fear {worry}.",
            "People say {hobby} is fun. With {time}, is it worth it? Honestly, {worry}.",
        )
    ).format(hobby=hobby, time=time, worry=worry)
    answer = (
        f"{reply} Yes, go for it. {_WORRIES[worry]} {first}; {second}. {_TIMES[time]} Remember that {third}. "
        "After a month you will be surprised how far you have come."
    )
    turns = [user(f"{opening} {request}"), assistant(answer)]
    if rng.random() < 0.35:
        turns += [
            user(rng.choice(("What if I stop liking it?", "And if it gets dull?"))),
            assistant(
                f"Then change the routine instead of quitting. Meet others who enjoy {hobby}, because company brings "
                f"new ideas. {first} again as on the first day, and keep in mind that {third}. {_WORRIES[worry]}"
            ),
        ]
    return turns


def _mood(rng: random.Random) -> list[Message]:
    """Draw a talk about a feeling and an event that lies ahead."""
    opening, reply = _opening(rng)
    mood, event, day = _pick(rng, _MOODS), _pick(rng, _EVENTS), rng.choice(WEEKDAYS)
    feeling, advice = _MOODS[mood]
    first, second = _EVENTS[event]
    request = rng.choice(
        (
            "I feel {mood} today and on {day} I have {event}.",
            "There is {event} waiting for me on {day}. I am quite {mood}.",
            "On {day} comes {event}, and right now I am {mood}. What now?",
        )
    ).format(mood=mood, event=event, day=day)
    answer = (
        f"{reply} {feeling} {advice} As for the days ahead: {first}, and one more thought: {second}. Soon all of it "
        "will be behind you, so plan a little treat for yourself. I keep my fingers crossed!"
    )
    return [user(f"{opening} {request}"), assistant(answer)]


_TOPICS: Final[tuple[Callable[[random.Random], list[Message]], ...]] = (
    _travel,
    _travel,
    _cooking,
    _hobby,
    _mood,
)


def make_dialogue(rng: random.Random) -> Draw:
    """Draw a conversation; its last reply is the reference answer."""
    *messages, last = rng.choice(_TOPICS)(rng)
    return Draw(
        messages=tuple(messages), answer=last["content"], checker=same_text(last["content"])
    )
