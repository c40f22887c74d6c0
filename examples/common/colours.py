"""One colour for each kind of method, in all figures; most are Okabe and Ito's, for all kinds of eyes."""

FINE_TUNING = "#808080"
JOINT = "#000000"
REPLAY = "#009E73"
REPLAY_WEIGHTED = "#00573F"
REPLAY_OF_OUTPUTS = "#BB4D8F"  # contrast of 4 with a page
NO_EXAMPLES = "#CC79A7"
AGEM = "#E69F00"
GEM = "#0072B2"
GEM_STEP = "#332288"
GEM_WEIGHTED = "#D55E00"
IGEM = "#56B4E9"
