"""Catalogues and hand-written queries of `ranking.py`: a shop that is made here, and the captions of the stamps."""

import random

PRODUCTS = """
Tables: dining table (oak walnut pine); coffee table (oak glass marble); side table (steel bamboo walnut)
Tables: picnic table (pine teak)
Desks: standing desk (oak bamboo); writing desk (walnut birch)
Chairs: armchair (velvet leather); rocking chair (oak beech); office chair (mesh leather); bar stool (steel beech)
Chairs: folding deck chair (teak canvas); high chair (beech plastic)
Sofas: corner sofa (linen velvet); sofa bed (linen leather); ottoman (velvet wicker)
Storage: bookcase (oak pine walnut); wardrobe (pine birch); chest of drawers (oak pine); shoe cabinet (steel oak)
Storage: coat rack (beech steel); wine rack (oak steel); waste basket (steel wicker)
Beds: bunk bed (pine steel); four-poster bed (oak walnut); crib (beech birch); mattress (latex foam)
Lighting: floor lamp (brass steel); chandelier (crystal brass); flashlight (steel plastic); string lights (copper)
Textiles: throw pillow (linen velvet); comforter (down cotton); drapes (linen velvet); carpet (wool jute)
Textiles: tablecloth (linen cotton); bath towel (cotton bamboo)
Kitchen: induction cooktop (glass); refrigerator (steel); faucet (brass steel); frying pan (steel copper)
Kitchen: cutting board (bamboo oak); kettle (steel glass); toaster (steel plastic); garbage can (steel plastic)
Garden: trampoline (steel); patio umbrella (canvas); wheelbarrow (steel); lawn mower (steel); hammock (cotton canvas)
Garden: flower pot (terracotta); greenhouse (glass)
Nursery: baby stroller (canvas steel); changing table (pine beech); pacifier (plastic); diaper bag (canvas)
Electronics: mobile phone (glass); headphones (plastic leather); vacuum cleaner (plastic); television (glass)
"""
BRANDS = "Norrvik Halden Castellani Brightwell Oakmere Tamura Feldhaus Quillon Severin Maplewick".split()
COLOURS = "white black grey navy green red natural cream".split()
DETAILS = [
    "easy to assemble", "with hidden storage", "for small rooms", "handmade", "set of two", "limited edition",
    "scratch resistant", "made in Portugal", "with adjustable feet", "extra large", "for indoors and outdoors", "",
]  # fmt: skip
CODES = "NV HD CS BW OM TM FH QL SV MW".split()

SHOP = """
exact: oak dining table = dining table, oak
exact: white bookcase = bookcase, white
exact: red velvet armchair = armchair, velvet, red
exact: standing desk bamboo = standing desk, bamboo
exact: crystal chandelier = chandelier, crystal
exact: black floor lamp brass = floor lamp, black, brass
exact: folding deck chair = folding deck chair
exact: navy wool carpet = carpet, wool, navy
exact: terracotta flower pot = flower pot
swapped: oak dinnig table = dining table, oak
swapped: chandeleir = chandelier
swapped: leather offcie chair = office chair, leather
swapped: trampolnie = trampoline
swapped: bookacse walnut = bookcase, walnut
swapped: vacuum claener = vacuum cleaner
swapped: wheelabrrow = wheelbarrow
swapped: velvet otoman green = ottoman, velvet, green
swapped: gerenhouse = greenhouse
missing: wardobe pine = wardrobe, pine
missing: hamock = hammock
missing: headphnes = headphones
missing: marble cofee table = coffee table, marble
missing: televison = television
missing: mattrss latex = mattress, latex
missing: tablcloth linen = tablecloth, linen
missing: refrigrator = refrigerator
missing: bnk bed pine = bunk bed, pine
prefix: wardr = wardrobe
prefix: tramp = trampoline
prefix: refrig = refrigerator
prefix: chandel = chandelier
prefix: copper fryi = frying pan, copper
prefix: wheelb = wheelbarrow
prefix: headph = headphones
prefix: green hamm = hammock, green
prefix: matt = mattress
plural: bookcases = bookcase
plural: rocking chairs = rocking chair
plural: pine wardrobes = wardrobe, pine
plural: lawn mowers = lawn mower
plural: kettles glass = kettle, glass
plural: linen tablecloths = tablecloth, linen
plural: bath towels = bath towel
plural: toasters = toaster
plural: wine racks = wine rack
brand: Castellani = Castellani
brand: quillon armchair = Quillon, armchair
brand: feldhaus kettle = Feldhaus, kettle
brand: Tamura floor lamp = Tamura, floor lamp
brand: brightwel = Brightwell
brand: oakmere bookcase = Oakmere, bookcase
brand: severin toaster = Severin, toaster
brand: Norrvik = Norrvik
brand: maplewick crib = Maplewick, crib
synonym: hob = induction cooktop
synonym: pram = baby stroller
synonym: couch = corner sofa / sofa bed
synonym: fridge = refrigerator
synonym: cot = crib
synonym: torch = flashlight
synonym: duvet = comforter
synonym: cushion = throw pillow
synonym: curtains = drapes
synonym: rubbish bin = garbage can / waste basket
synonym: tap = faucet
synonym: nappy bag = diaper bag
synonym: cell phone = mobile phone
synonym: rug = carpet
synonym: parasol = patio umbrella
synonym: footstool = ottoman
synonym: dummy for babies = pacifier
synonym: hoover = vacuum cleaner
"""

STAMPS = """
exact: red apple = A red apple.
exact: hot air balloon = A hot air balloon.
exact: electric guitar = An electric guitar.
exact: a pair of binoculars = A pair of binoculars.
exact: christmas tree = A Christmas tree.
exact: rubber duck = A rubber duck.
exact: steam locomotive = A steam locomotive.
exact: the full moon = The full moon.
swapped: a girafef = A giraffe.
swapped: kagnaroo = A kangaroo. / A red kangaroo.
swapped: steam locmootive = A steam locomotive.
swapped: stehtoscope = A stethoscope lets your doctor listen to your heart and lungs.
swapped: pineaplpe = A pineapple.
swapped: a flmaingo = A pink flamingo.
swapped: snomwan = A snowman.
swapped: windimll = A windmill.
swapped: tenins racket = A tennis racket.
missing: elephnt = An elephant.
missing: hipopotamus = An hippopotamus.
missing: strawbery = A strawberry.
missing: pressure coker = A pressure cooker.
missing: buterfly = A butterfly.
missing: pomegranat = A pomegranate.
missing: volleybal = A volleyball.
missing: brocoli = Eat your broccoli!
prefix: pomeg = A pomegranate.
prefix: helicop = Eddie the Helicopter.
prefix: kiwi = A kiwifruit.
prefix: chimp = A chimpanzee.
prefix: mush = A mushroom. / A cep. / A red headed cep.
prefix: astro = An astronaut making a spacewalk!
prefix: hedge = A hedgehog.
prefix: mari = A marigold.
plural: squirrels = A squirrel.
plural: carrots = A carrot.
plural: red tomatoes = A ripe, red tomato!
plural: pigeons = A pigeon.
plural: ostriches = An ostrich.
plural: igloos = An igloo.
plural: mandarin oranges = A mandarin orange.
plural: hammers = A hammer.
plural: foxes = A fox.
kind: vehicles = #vehicles
kind: sports = #sports
kind: clothes = #clothes
kind: medical = #medical
kind: space = #space
kind: food = #food
kind: plants = #plants
kind: household = #household
synonym: cop car = Police car emblems to put on the sedan.
synonym: aubergine = An eggplant. / An eggplant with fruit.
synonym: spaceman = An astronaut making a spacewalk!
synonym: lorry = A pickup truck. / A huge dump truck. / A garbage truck. / A fire truck.
synonym: bunny rabbit = A rabbit. / A bunny. / A little rabbit. / A big eared rabbit. / A floppy-eared bunny.
synonym: trousers = A pair of pants.
synonym: spanner = A wrench. / An adjustable wrench. / A plumber’s wrench.
synonym: prison = A jailhouse.
synonym: sea gull bird = A seagull. / A Silver Gull.
synonym: aeroplane = An airplane.
synonym: maize = Sweet yellow corn.
synonym: caterpillar that became an adult = A butterfly.
synonym: thunderstorm = A lightning bolt.
synonym: pushbike for toddlers = A pink tricycle.
synonym: fiddle = A violin.
synonym: sticking plaster = An adhesive bandage.
"""


def shop(rows: int = 820, seed: int = 51) -> list[dict[str, str]]:
    """Rows with `id` (a SKU), `text` (a title), `brand`, `category`, and what they are: `terms`, joined by commas."""
    rng = random.Random(seed)
    products = [
        (category, name.strip(), materials.rstrip(")").split())
        for line in PRODUCTS.strip().splitlines()
        for category, _, listed in [line.partition(": ")]
        for name, _, materials in (each.partition(" (") for each in listed.split("; "))
    ]
    table = []
    for number in range(rows):
        category, product, materials = products[number % len(products)]
        material, colour, brand = rng.choice(materials), rng.choice(COLOURS), rng.randrange(len(BRANDS))
        name, detail = product.capitalize(), rng.choice(DETAILS)
        titles = f"{name}, {material}, {colour}", f"{colour.capitalize()} {product} {material}"
        title = rng.choice([*titles, f"{material.capitalize()} {product} in {colour}", f"{name} {colour} {material}"])
        table.append({
            "id": f"{CODES[brand]}-{rng.randrange(10_000, 99_999)}-{number % 7}{rng.choice('ABCDEF')}",
            "text": f"{title}, {detail}" if detail else title,
            "brand": BRANDS[brand],
            "category": category,
            "terms": ", ".join((product, material, colour, BRANDS[brand])),
        })  # fmt: skip
    return table


def read_queries(text: str) -> list[tuple[str, str, list[set[str]]]]:
    """The kind and the words of each query, and the terms of a right row: all of one of the sets."""
    queries = []
    for line in text.strip().splitlines():
        asked, _, right = line.rpartition(" = ")
        kind, _, words = asked.partition(": ")
        queries.append((kind, words, [{term.strip() for term in each.split(", ")} for each in right.split(" / ")]))
    return queries
