/* Sudoku at speed, for building training sets: generate, rate, and shrink puzzles with one solution.
 * A board is 81 bytes, 0 for empty. A cell's candidates are nine bits. sudoku_gen.py compiles and calls this file;
 * without a compiler it falls back to Python, which makes the same kind of puzzle fifty times slower. */
#include <stdint.h>
#include <string.h>

typedef struct { uint16_t cand[81]; uint16_t done[81]; int left; } State;

static uint8_t peers[81][20];
static uint8_t units[27][9];
static int ready = 0;

static void prepare(void) {
    if (ready) return;
    for (int u = 0; u < 9; u++)
        for (int k = 0; k < 9; k++) {
            units[u][k] = (uint8_t)(u * 9 + k);
            units[9 + u][k] = (uint8_t)(k * 9 + u);
            units[18 + u][k] = (uint8_t)((u / 3 * 3 + k / 3) * 9 + u % 3 * 3 + k % 3);
        }
    for (int c = 0; c < 81; c++) {
        int n = 0, row = c / 9, col = c % 9;
        for (int o = 0; o < 81; o++) {
            int same_box = o / 9 / 3 == row / 3 && o % 9 / 3 == col / 3;
            if (o != c && (o / 9 == row || o % 9 == col || same_box)) peers[c][n++] = (uint8_t)o;
        }
    }
    ready = 1;
}

/* splitmix64: one 64-bit word of state, so that a seed names the whole run. */
static uint64_t next_random(uint64_t *s) {
    uint64_t z = (*s += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}
static int below(uint64_t *s, int n) { return (int)((next_random(s) >> 33) % (uint64_t)n); }

static void shuffle(uint8_t *a, int n, uint64_t *s) {
    for (int i = n - 1; i > 0; i--) {
        int j = below(s, i + 1);
        uint8_t t = a[i]; a[i] = a[j]; a[j] = t;
    }
}

/* Writes `bit` at a cell and follows every cell that is left with one candidate. 0 when that is impossible. */
static int assign(State *st, int cell, uint16_t bit) {
    uint8_t stack[81];
    int top = 0;
    if (!(st->cand[cell] & bit)) return 0;
    if (st->done[cell]) return 1;
    st->cand[cell] = bit;
    st->done[cell] = 1;
    stack[top++] = (uint8_t)cell;
    while (top) {
        int c = stack[--top];
        uint16_t b = st->cand[c];
        st->left--;
        for (int k = 0; k < 20; k++) {
            int p = peers[c][k];
            uint16_t m = st->cand[p];
            if (m & b) {
                m &= (uint16_t)~b;
                if (!m) return 0;
                st->cand[p] = m;
                if (!(m & (m - 1))) { st->done[p] = 1; stack[top++] = (uint8_t)p; }
            }
        }
    }
    return 1;
}

/* Fills digits that fit one place of a unit until none is left to fill. 0 on a contradiction. */
static int hidden_singles(State *st) {
    int changed = 1;
    while (changed && st->left) {
        changed = 0;
        for (int u = 0; u < 27; u++) {
            unsigned once = 0, twice = 0, fixed = 0;
            const uint8_t *unit = units[u];
            for (int k = 0; k < 9; k++) {
                unsigned m = st->cand[unit[k]];
                twice |= once & m;
                once |= m;
                if (st->done[unit[k]]) fixed |= m;
            }
            if (once != 0x1FF) return 0;
            unsigned single = once & ~twice & ~fixed;
            if (!single) continue;
            changed = 1;
            for (int k = 0; k < 9 && single; k++) {
                unsigned m = st->cand[unit[k]] & single;
                if (!m) continue;
                if (m & (m - 1)) return 0;
                if (!st->done[unit[k]] && !assign(st, unit[k], (uint16_t)m)) return 0;
                single &= ~m;
            }
        }
    }
    return 1;
}

typedef struct {
    long limit, found, guesses;
    uint64_t *rng;              /* when set, values are tried in random order */
    uint8_t *first;             /* when set, gets the first solution */
    uint32_t (*tally)[9];       /* when set, counts each (cell, digit) over all solutions */
} Search;

static void report(const State *st, Search *se) {
    if (se->first && se->found == 0)
        for (int c = 0; c < 81; c++) se->first[c] = (uint8_t)(__builtin_ctz(st->cand[c]) + 1);
    if (se->tally)
        for (int c = 0; c < 81; c++) se->tally[c][__builtin_ctz(st->cand[c])]++;
    se->found++;
}

static void search(const State *st, Search *se) {
    if (!st->left) { report(st, se); return; }
    int best = -1, fewest = 10, ties = 0;
    for (int c = 0; c < 81; c++) {
        if (st->done[c]) continue;
        int n = __builtin_popcount(st->cand[c]);
        if (n < fewest) { fewest = n; best = c; ties = 1; if (n == 2 && !se->rng) break; }
        else if (n == fewest && se->rng && below(se->rng, ++ties) == 0) best = c;
    }
    uint8_t order[9];
    int n = 0;
    for (int d = 0; d < 9; d++) if (st->cand[best] >> d & 1) order[n++] = (uint8_t)d;
    if (se->rng) shuffle(order, n, se->rng);
    for (int k = 0; k < n && se->found < se->limit; k++) {
        State copy = *st;
        se->guesses++;
        if (assign(&copy, best, (uint16_t)(1u << order[k])) && hidden_singles(&copy)) search(&copy, se);
    }
}

/* Candidates from the givens; 0 when they contradict each other. */
static int load(State *st, const uint8_t *board) {
    prepare();
    for (int c = 0; c < 81; c++) { st->cand[c] = 0x1FF; st->done[c] = 0; }
    st->left = 81;
    for (int c = 0; c < 81; c++)
        if (board[c] && !assign(st, c, (uint16_t)(1u << (board[c] - 1)))) return 0;
    return hidden_singles(st);
}

/* Number of solutions up to `limit`; the first one and the number of guesses are written when asked for. */
long sudoku_solve(const uint8_t *board, long limit, uint8_t *solution, long *guesses) {
    State st;
    Search se = {limit, 0, 0, 0, solution, 0};
    if (load(&st, board)) search(&st, &se);
    if (guesses) *guesses = se.guesses;
    return se.found;
}

/* Whether the board without this given has a solution with another value there. */
static int needed(uint8_t *board, int cell) {
    State st;
    uint8_t value = board[cell];
    board[cell] = 0;
    Search se = {1, 0, 0, 0, 0, 0};
    if (load(&st, board) && st.cand[cell] != (1u << (value - 1))) {
        uint16_t others = st.cand[cell] & (uint16_t)~(1u << (value - 1));
        for (int d = 0; d < 9 && !se.found; d++)
            if (others >> d & 1) {
                State copy = st;
                if (assign(&copy, cell, (uint16_t)(1u << d)) && hidden_singles(&copy)) search(&copy, &se);
            }
    }
    board[cell] = value;
    return se.found > 0;
}

/* Removes givens in random order while the solution stays the only one, down to `floor` givens. */
static int dig(uint8_t *board, int floor, uint64_t *rng) {
    uint8_t order[81];
    int n = 0, givens;
    for (int c = 0; c < 81; c++) if (board[c]) order[n++] = (uint8_t)c;
    givens = n;
    shuffle(order, n, rng);
    for (int k = 0; k < n && givens > floor; k++)
        if (!needed(board, order[k])) { board[order[k]] = 0; givens--; }
    return givens;
}

/* `count` puzzles, each dug down to floors[i] givens or until minimal, with solutions and guesses. */
void sudoku_generate(uint64_t seed, long count, const uint8_t *floors, uint8_t *puzzles, uint8_t *solutions,
                     uint16_t *guesses) {
    uint64_t rng = seed;
    prepare();
    for (long i = 0; i < count; i++) {
        uint8_t *puzzle = puzzles + 81 * i, *solution = solutions + 81 * i;
        State st;
        static const uint8_t empty[81];
        Search se = {1, 0, 0, &rng, solution, 0};
        load(&st, empty);
        search(&st, &se);
        memcpy(puzzle, solution, 81);
        dig(puzzle, floors[i], &rng);
        long n;
        sudoku_solve(puzzle, 2, 0, &n);
        guesses[i] = (uint16_t)(n > 65535 ? 65535 : n);
    }
}

/* Looks for puzzles close by: take one or two givens away, enumerate all solutions, and put one back that occurs in a
 * single solution. Writes at most `room` minimal puzzles of as many givens or of one fewer; returns how many. */
long sudoku_shrink(uint64_t seed, const uint8_t *board, int take, long limit, long room, uint8_t *puzzles,
                   uint8_t *solutions) {
    uint64_t rng = seed;
    long made = 0;
    uint8_t cells[81], work[81];
    uint32_t tally[81][9];
    int n = 0;
    for (int c = 0; c < 81; c++) if (board[c]) cells[n++] = (uint8_t)c;
    for (int i = 0; i < n && made < room; i++)
        for (int j = take == 1 ? i : i + 1; j < (take == 1 ? i + 1 : n) && made < room; j++) {
            State st;
            memcpy(work, board, 81);
            work[cells[i]] = work[cells[j]] = 0;
            memset(tally, 0, sizeof tally);
            Search se = {limit, 0, 0, 0, 0, tally};
            if (load(&st, work)) search(&st, &se);
            if (se.found >= limit) continue;
            for (int c = 0; c < 81 && made < room; c++)
                for (int d = 0; d < 9 && made < room; d++)
                    if (!work[c] && tally[c][d] == 1 && board[c] != d + 1) {
                        uint8_t *out = puzzles + 81 * made;
                        memcpy(out, work, 81);
                        out[c] = (uint8_t)(d + 1);
                        dig(out, 0, &rng);
                        sudoku_solve(out, 1, solutions + 81 * made, 0);
                        made++;
                    }
        }
    return made;
}
