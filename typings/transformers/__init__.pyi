"""The names of transformers that Groupwise takes from its top, each from the file that defines it.

For pyright, which takes two thirds of the time with it: transformers' own `__init__.py` names what stands in 2,500 files,
and it would read them all to find these.  The types are transformers' own.
"""

from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.logits_process import LogitsProcessor as LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList as LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria as StoppingCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList as StoppingCriteriaList
from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification as AutoModelForSequenceClassification
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config as Gemma2Config
from transformers.models.gpt2.configuration_gpt2 import GPT2Config as GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel as GPT2LMHeadModel
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM as MistralForCausalLM
from transformers.models.mixtral.configuration_mixtral import MixtralConfig as MixtralConfig
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast

__version__: str
