"""The document and the questions of `mallee demo`: about a thousand tokens, and five things to ask."""

DOCUMENT = """\
Field notes on the mallee country

A mallee is a eucalypt that grows many stems from one root. Where a forest gum puts its strength into
a single trunk, a mallee spreads it over ten, twenty or thirty thin stems, each about as tall as a
house, all of them rising from a woody swelling at ground level that is called a lignotuber. The word
comes from the Wemba Wemba people of what is now north-western Victoria, and it names three things at
once: the way of growing, the species that grow so, and the dry country in which they stand. More
than four hundred species of eucalypt are mallees. They cover about a tenth of southern Australia, in
a belt that runs from the wheat fields of New South Wales through Victoria and South Australia to the
goldfields of the west.

The soil is poor: red and yellow sand over limestone, blown into long low dunes by winds that died
down ten thousand years ago. Rain is scarce and comes when it likes. A good year brings four hundred
millimetres, a bad one not two hundred. In summer the ground is too hot for a bare hand by ten in the
morning. Little that lives here can afford to waste anything, and the mallee wastes nothing. Its
leaves hang edge-on to the sun. Its roots reach down past thirty metres in search of water, and the
old people knew how to cut a length of shallow root, stand it on end in a bark dish and wait for the
clear water to run out. A good root gave more than a litre.

What makes the mallee remarkable, though, is what happens after fire. Fires come every twenty to
fifty years, started by dry lightning. The oil in the leaves burns fiercely, and within an hour a
stand that took decades to grow is ash and black poles. A pine would be dead. The mallee has kept
its reserve underground. The lignotuber, which may weigh as much as a small car and be several
hundred years old, is full of starch and covered with sleeping buds. About six weeks after the fire
the first red shoots push through the ash. There may be seventy of them. Over the next years the
shoots compete for light and water, most are dropped, and the best dozen become stems. The root did
not have to start again. Everything it had stored was there for every shoot, and no shoot had to
carry it alone.

Farmers who came in the 1880s hated it. They rolled the stems flat with old boilers dragged by teams
of bullocks, burned the remains and sowed wheat, and the next spring the mallee came up through the
wheat. A smith named Richard Smith answered with the stump-jump plough in 1876: each of its shares
was hinged, and rode up over a root instead of breaking on it. The stumps that were grubbed out were
sold by the ton as firewood in Melbourne, because a mallee root burns slowly and very hot. The
clearing went too far. Without roots to hold it the sand began to move again, and in the drought of
1914 dust from the mallee fell as red snow on the mountains of New Zealand. Salt rose with the water
table that the trees no longer drank from. Today a good part of the remaining country is reserve.

One bird belongs to the mallee as no other does. The malleefowl, a grey and chestnut bird of about
two kilograms, does not sit on its eggs. The male rakes leaves and sand into a mound that may be five
metres across and one metre high, and lets the rotting leaves warm the eggs. He tests the heat with
his bill, several times a day for as long as eleven months of the year, and opens or closes the
mound so that it stays at thirty-three degrees. The hen lays about twenty eggs, one every five or six
days. The chicks dig themselves out, which can take fifteen hours, and walk off alone. They never
meet their parents. Foxes take most of them, and fewer than one in a hundred lives to breed.

Beekeepers like the mallee for its honey, which is pale and sets slowly. Oil is distilled from the
leaves of the blue mallee: it takes about a hundred kilograms of leaf to make one and a half of oil,
and the trees are simply cut at the ground every second year, since they always come back. Wood
turners prize the burl for its grain. In the west there are trials to grow mallees in strips between
the wheat, to drink the rising salt water and to feed a small power station with what is cut.

What should a visitor look for? Go in early spring, after rain, and go at dawn. Walk along the crest
of a dune, where the spinifex grows in rings. Look at the ground more than at the sky. Tracks cross
the sand like writing. Where the stems rise in a circle around an empty middle, the first stem is
long gone, and the ring is one tree: it may be older than any building in the country.
"""

QUESTIONS = (
    "What happens to a mallee after a fire?",
    "How did the old people get water from the tree?",
    "What was special about the stump-jump plough?",
    "How does the malleefowl keep its eggs warm?",
    "What should a visitor look for, and when?",
)
