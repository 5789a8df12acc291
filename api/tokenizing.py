"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from dataclasses import dataclass

import msgspec

from mallee.api.chat.reading import ChatReader
from mallee.api.prompts import PromptReader
from mallee.api.text.tokenizer import Tokenizer
from mallee.protocol.api.generate import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from mallee.protocol.errors import BadRequest, InvalidParameter
from mallee.protocol.ids import Scope


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """Texts to tokens and back, without a worker. Its methods give JSON, and raise BadRequest."""

    reader: PromptReader
    chat: ChatReader
    tokenizer: Tokenizer
    max_model_len: int

    def tokenize(self, request: TokenizeRequest, scope: Scope) -> bytes:
        """Tokens as a completion or a chat of the same prompt or messages has them."""
        if (request.prompt is None) == (request.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")
        asked = request.add_special_tokens
        if request.messages is None:
            tokens = self.reader.text(request.prompt, scope, starts=asked is not False)
        else:
            tokens, _ = self.chat.prefix(request, scope, starts=asked is True)
        ids: list[int] = tokens.tolist()
        written = [self.tokenizer.token_text(i) for i in ids] if request.return_token_strs else None
        answer = Tokenized(
            count=len(ids), max_model_len=self.max_model_len, tokens=ids, token_strs=written
        )
        return msgspec.json.encode(answer)

    def detokenize(self, request: DetokenizeRequest, scope: Scope) -> bytes:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        if request.tokens is None:
            raise InvalidParameter("tokens", None, "give a list of token ids")
        ids = self.reader.ids(request.tokens, "tokens").tolist()
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return msgspec.json.encode(Detokenized(prompt=text))
