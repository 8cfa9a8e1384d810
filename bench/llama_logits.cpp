// What the stock llama.cpp makes of a text: its tokens, and the logits after each of them. Compiled and used by peer_logits.py.
//
//   llama_logits tokens MODEL.gguf TEXT OUT            the tokens of the file TEXT, as 32-bit integers
//   llama_logits logits MODEL.gguf IDS OUT WINDOW N    the logits (f32) after each token of IDS (32-bit integers) that is not the last of its window of WINDOW tokens;
//                                                      each window from an empty context, on N threads, with keys and values in f32
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

static void fail(const std::string & what) {
    std::cerr << "llama_logits: " << what << "\n";
    std::exit(1);
}

static std::string content(const char * path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) fail(std::string("cannot read ") + path);
    return {std::istreambuf_iterator<char>(file), {}};
}

static llama_model * open(const char * path, bool vocabulary_only) {
    llama_model_params parameters = llama_model_default_params();
    parameters.vocab_only = vocabulary_only;
    llama_model * model = llama_model_load_from_file(path, parameters);
    if (!model) fail(std::string("cannot load ") + path);
    return model;
}

static void write_tokens(const char * path, const char * text_path, std::ofstream & out) {
    const llama_vocab * vocabulary = llama_model_get_vocab(open(path, true));
    std::string text = content(text_path);
    std::vector<llama_token> tokens(text.size() + 8);
    int count = llama_tokenize(vocabulary, text.data(), (int) text.size(), tokens.data(), (int) tokens.size(), false, false);
    if (count < 0) fail(std::string("cannot make tokens of ") + text_path);
    out.write((const char *) tokens.data(), count * sizeof(llama_token));
}

static void write_logits(const char * path, const char * ids_path, std::ofstream & out, int window, int threads) {
    llama_model * model = open(path, false);
    int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::string bytes = content(ids_path);
    const llama_token * ids = (const llama_token *) bytes.data();
    int total = (int) (bytes.size() / sizeof(llama_token));
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = window;
    parameters.n_threads = parameters.n_threads_batch = threads;
    parameters.type_k = parameters.type_v = GGML_TYPE_F32;
    llama_context * context = llama_init_from_model(model, parameters);
    if (!context) fail("cannot make a context");
    llama_batch batch = llama_batch_init(window, 0, 1);
    for (int first = 0; first < total; first += window) {
        int count = std::min(window, total - first);
        if (count < 2) break;
        llama_memory_clear(llama_get_memory(context), true);
        batch.n_tokens = count;
        for (int i = 0; i < count; i++) {
            batch.token[i] = ids[first + i];
            batch.pos[i] = i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = 1;
        }
        if (llama_decode(context, batch) != 0) fail("cannot compute a window");
        for (int i = 0; i + 1 < count; i++) out.write((const char *) llama_get_logits_ith(context, i), vocabulary * sizeof(float));
    }
}

int main(int count, char ** arguments) {
    std::string what = count > 1 ? arguments[1] : "";
    if (!((what == "tokens" && count == 5) || (what == "logits" && count == 7))) fail("wrong arguments; the source says which there are");
    llama_log_set([](ggml_log_level level, const char * text, void *) { if (level == GGML_LOG_LEVEL_ERROR) std::cerr << text; }, nullptr);
    ggml_backend_load_all();
    std::ofstream out(arguments[4], std::ios::binary);
    if (what == "tokens") write_tokens(arguments[2], arguments[3], out);
    else write_logits(arguments[2], arguments[3], out, std::atoi(arguments[5]), std::atoi(arguments[6]));
    out.close();
    if (!out) fail(std::string("cannot write ") + arguments[4]);
}
