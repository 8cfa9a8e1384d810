//! The tokenizer as the grammar library sees it: how a text that must come next is cut into tokens.

use crate::text::{SpecialTokens, Tokenizer};
use llguidance::toktrie::{TokTrie, TokenId, TokenizerEnv};

/// A tokenizer and the table of its tokens' bytes.
pub(super) struct Words {
    trie: TokTrie,
    tokenizer: Tokenizer,
}

impl Words {
    pub(super) fn new(trie: TokTrie, tokenizer: Tokenizer) -> Self {
        Self { trie, tokenizer }
    }
}

impl TokenizerEnv for Words {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// What must come is looked for by [`super::follower`]: the library's own search goes on as long as a grammar forces something.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }

    /// As the tokenizer itself would cut it, so that the model sees what it has learnt. Where that changes the text (a space put in front, a character normalised), the longest tokens that
    /// fit, one after the other.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let text = std::str::from_utf8(bytes).ok();
        let ids = text.and_then(|text| self.tokenizer.encode(text, false, SpecialTokens::AsText).ok());
        let is_the_text =
            |ids: &Vec<u32>| ids.iter().all(|id| (*id as usize) < self.trie.vocab_size()) && self.trie.decode_raw(ids) == bytes;
        ids.filter(is_the_text).unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}
